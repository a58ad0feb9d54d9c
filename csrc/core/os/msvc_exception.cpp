// SPDX-License-Identifier: Apache-2.0
// An exception as the code that Microsoft's compiler makes throws it, for torch on Windows: that code does not catch those of
// gcc. The layouts are those of its runtime for x86-64; all addresses of code and tables are offsets in our library.
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <iterator>
#include <string>

#include "core/os.hpp"

extern "C" const char __ImageBase;  // of the linker: where this library lies

namespace lowbit::os {
namespace {

using Offset = int32_t;
Offset offset_of(const void* at) { return static_cast<Offset>(static_cast<const char*>(at) - &__ImageBase); }

// A class, found by its name.
struct Type {
  const void* functions = nullptr;  // of type_info, which nobody asks
  void* spare = nullptr;
  char name[48];
};
Type kBuiltin{.name = ".?AVbuiltin_exception@pybind11@@"}, kRuntimeError{.name = ".?AVruntime_error@std@@"},
    kException{.name = ".?AVexception@std@@"};

// An std::exception with its virtual functions; classes that derive from it here add none of their own data.
struct Exception {
  const void* const* functions;
  const char* text;
  bool owns_text = false;
};

// A class as which the exception may be caught; without a function of its own it is copied by bytes.
struct Catchable {
  uint32_t properties = 0;
  Offset type;
  int32_t member = 0, base_of_virtual = -1, virtual_base = 0, bytes = sizeof(Exception);
  Offset copy = 0;
};
struct CatchableList {
  int32_t count = 3;
  Offset types[3];
};
struct Thrown {
  uint32_t attributes = 0;
  Offset destructor = 0, unused = 0, catchable;
};

// The class as dynamic_cast sees it, which pybind11 asks whether the exception nests another.
struct Base {
  Offset type;
  uint32_t bases;  // of this one
  int32_t member = 0, base_of_virtual = -1, virtual_base = 0;
  uint32_t attributes = 0;
};
struct Hierarchy {
  uint32_t signature = 0, attributes = 0, count = 3;
  Offset bases;
};
struct Located {
  uint32_t signature = 1, offset = 0, offset_of_constructor = 0;
  Offset type, hierarchy, self;
};

void* destroy(void* exception, unsigned) { return exception; }
const char* what(const Exception* exception) { return exception->text; }

// pybind11::builtin_exception::set_error() for each of Python's types that is thrown.
thread_local const char* python_type = nullptr;
void set_error(const Exception* exception) {
  using SetString = void (*)(void* type, const char* text);
  const auto set_string = reinterpret_cast<SetString>(find_symbol(nullptr, "PyErr_SetString"));
  auto* const type = static_cast<void**>(find_symbol(nullptr, python_type));
  if (set_string && type) set_string(*type, exception->text);
}

// The class, its base and the base of that.
struct Tables {
  Catchable catchable[3] = {{.type = offset_of(&kBuiltin)}, {.type = offset_of(&kRuntimeError)}, {.type = offset_of(&kException)}};
  CatchableList list{.types = {offset_of(&catchable[0]), offset_of(&catchable[1]), offset_of(&catchable[2])}};
  Thrown thrown{.catchable = offset_of(&list)};
  Base bases[3] = {{.type = catchable[0].type, .bases = 2}, {.type = catchable[1].type, .bases = 1}, {.type = catchable[2].type, .bases = 0}};
  Offset base_offsets[3] = {offset_of(&bases[0]), offset_of(&bases[1]), offset_of(&bases[2])};
  Hierarchy hierarchy{.bases = offset_of(base_offsets)};
  Located located{.type = offset_of(&kBuiltin), .hierarchy = offset_of(&hierarchy), .self = offset_of(&located)};
  const void* with_functions[4] = {&located, reinterpret_cast<const void*>(destroy), reinterpret_cast<const void*>(what),
                                   reinterpret_cast<const void*>(set_error)};
};
const Tables kTables;  // filled when the library is loaded, at its place

}  // namespace

void throw_python_error(const char* type, const char* text) {
  static thread_local std::string kept;  // the exception is caught in this thread
  kept = text;
  static thread_local Exception exception;
  exception = {.functions = kTables.with_functions + 1, .text = kept.c_str()};
  python_type = type;
  constexpr DWORD kCode = 0xe06d7363;
  constexpr ULONG_PTR kVersion = 0x19930520;
  const ULONG_PTR arguments[] = {kVersion, reinterpret_cast<ULONG_PTR>(&exception), reinterpret_cast<ULONG_PTR>(&kTables.thrown),
                                 reinterpret_cast<ULONG_PTR>(&__ImageBase)};
  RaiseException(kCode, EXCEPTION_NONCONTINUABLE, std::size(arguments), arguments);
  __builtin_unreachable();
}

}  // namespace lowbit::os
