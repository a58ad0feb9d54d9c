// SPDX-License-Identifier: Apache-2.0
// The one exception type. `kind` decides the Python exception; the text says op, argument, got, wanted.
#pragma once

#include <cstddef>
#include <initializer_list>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

// Exported functions, for bindings and C++ programs; all others are hidden in the shared library.
#define LOWBIT_API __attribute__((visibility("default")))

namespace lowbit {

enum class LOWBIT_API ErrorKind { value, type, index, not_implemented, runtime };

class LOWBIT_API Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind(kind) {}
  ErrorKind kind;
};

// One part of a message: a text, or the address of a printable value. There are few types, so that the many messages
// share the code that assembles them.
class LOWBIT_API Part {
 public:
  Part(std::string_view text) : value_(text.data()), bytes_(text.size()) {}
  template <class T>
    requires(!std::is_convertible_v<const T&, std::string_view>)
  Part(const T& value)
      : value_(&value), print_([](std::ostream& out, const void* at) { out << *static_cast<const T*>(at); }) {}

 private:
  friend std::string join(std::initializer_list<Part> parts);
  const void* value_;
  std::size_t bytes_ = 0;
  void (*print_)(std::ostream&, const void*) = nullptr;
};

LOWBIT_API std::string join(std::initializer_list<Part> parts);
[[noreturn, gnu::cold]] LOWBIT_API void fail(ErrorKind kind, std::initializer_list<Part> parts);

// Inlined, because each literal length would otherwise instantiate a function.
template <class... Parts>
[[gnu::always_inline]] inline std::string concat(const Parts&... parts) {
  return join({Part(parts)...});
}

template <class... Parts>
[[gnu::always_inline]] inline void check(bool condition, ErrorKind kind, const Parts&... parts) {
  if (!condition) [[unlikely]] fail(kind, {Part(parts)...});
}

}  // namespace lowbit
