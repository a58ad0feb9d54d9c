// SPDX-License-Identifier: Apache-2.0
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#include <psapi.h>

#include <bit>
#include <filesystem>
#include <system_error>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "core/os.hpp"

namespace lowbit::os {
namespace {

std::filesystem::path wide(const std::string& utf8) { return std::filesystem::path(utf8); }

std::string said(std::string_view what, const std::string& path) { return concat(what, " ", path, ": ", last_error()); }

std::string file_of_module(HMODULE module) {
  wchar_t path[32768];
  const DWORD length = module ? GetModuleFileNameW(module, path, std::size(path)) : 0;
  return std::filesystem::path(std::wstring_view(path, length)).string();
}

std::vector<HMODULE> modules() {
  std::vector<HMODULE> all(1024);
  DWORD bytes = 0;
  if (!K32EnumProcessModules(GetCurrentProcess(), all.data(), static_cast<DWORD>(all.size() * sizeof(HMODULE)), &bytes))
    return {};
  all.resize(std::min(all.size(), bytes / sizeof(HMODULE)));
  return all;
}

std::atomic<uint64_t> loaded{1};
void WINAPI count_library(ULONG, const void*, void*) { loaded++; }
[[gnu::constructor]] void count_libraries() {
  using Register = LONG(WINAPI*)(ULONG flags, void(WINAPI*)(ULONG, const void*, void*), void* context, void** cookie);
  void* const function = find_symbol(GetModuleHandleW(L"ntdll.dll"), "LdrRegisterDllNotification");
  void* cookie = nullptr;
  if (function) reinterpret_cast<Register>(function)(0, count_library, nullptr, &cookie);
}

void (*of_fault)(const void*) = nullptr;

LONG WINAPI on_exception(EXCEPTION_POINTERS* what) {
  const EXCEPTION_RECORD& record = *what->ExceptionRecord;
  if (record.ExceptionCode == EXCEPTION_ACCESS_VIOLATION && record.NumberParameters >= 2)
    of_fault(reinterpret_cast<const void*>(record.ExceptionInformation[1]));
  return EXCEPTION_CONTINUE_SEARCH;
}

HANDLE native(const MappedFile& file) { return reinterpret_cast<HANDLE>(file.handle); }

}  // namespace

void* open_library(const char* path, bool) {  // functions of every library are found by find_symbol(nullptr, ..)
  const std::filesystem::path at = wide(path);
  return LoadLibraryExW(at.c_str(), nullptr, at.is_absolute() ? LOAD_WITH_ALTERED_SEARCH_PATH : 0);
}

void* loaded_library(const char* name) {
  HMODULE module = nullptr;
  GetModuleHandleExW(0, wide(name).c_str(), &module);
  return module;
}

std::string why_not_opened() { return last_error(); }

void* find_symbol(void* library, const char* name) {
  if (library) return reinterpret_cast<void*>(GetProcAddress(static_cast<HMODULE>(library), name));
  for (const HMODULE module : modules())
    if (void* const found = find_symbol(module, name)) return found;
  return nullptr;
}

std::string path_of_library(void* library) { return file_of_module(static_cast<HMODULE>(library)); }

std::string file_of(const void* code) {
  HMODULE module = nullptr;
  GetModuleHandleExW(GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT,
                     static_cast<const wchar_t*>(code), &module);
  return file_of_module(module);
}

uint64_t libraries_loaded() { return loaded; }
std::string name_of_library(std::string_view stem) { return concat(stem, ".dll"); }
const char kBetweenPaths = ';';

int cores() {
  DWORD_PTR ours = 0, all = 0;
  return GetProcessAffinityMask(GetCurrentProcess(), &ours, &all) ? std::popcount(static_cast<uint64_t>(ours)) : 0;
}

uint32_t thread_number() { return GetCurrentThreadId(); }
int process_number() { return static_cast<int>(GetCurrentProcessId()); }

std::string host_name() {
  char name[256] = {};
  DWORD length = sizeof name;
  return GetComputerNameExA(ComputerNameDnsHostname, name, &length) ? name : "";
}

std::string command_line() { return GetCommandLineA(); }
void in_forked_child(void (*)()) {}
void start_thread_without_signals(void (*function)()) { std::thread(function).detach(); }

void sleep_while(std::atomic<int>& word, int value) { WaitOnAddress(&word, &value, sizeof value, INFINITE); }
void wake(std::atomic<int>& word) { WakeByAddressSingle(&word); }

void on_user_signal(void (*)()) {}

void on_fault(void (*handler)(const void* address)) {
  of_fault = handler;
  AddVectoredExceptionHandler(1, on_exception);
}

void say(std::string_view text) {
  DWORD wrote = 0;
  WriteFile(GetStdHandle(STD_ERROR_HANDLE), text.data(), static_cast<DWORD>(text.size()), &wrote, nullptr);
}

struct Semaphore::Native {
  HANDLE semaphore = CreateSemaphoreW(nullptr, 0, LONG_MAX, nullptr);
};

Semaphore::Semaphore() : native_(new Native) {}
Semaphore::~Semaphore() { CloseHandle(native_->semaphore); }
void Semaphore::post() { ReleaseSemaphore(native_->semaphore, 1, nullptr); }
void Semaphore::wait(int64_t max_ns) { WaitForSingleObject(native_->semaphore, static_cast<DWORD>(max_ns / 1000000 + 1)); }

void prefer_huge_pages(void*, std::size_t) {}  // Windows gives them to privileged users alone

void* reserve_memory(std::size_t bytes) { return VirtualAlloc(nullptr, bytes, MEM_RESERVE, PAGE_NOACCESS); }

bool allow_access(void* data, std::size_t bytes) {
  DWORD before = 0;
  return VirtualAlloc(data, bytes, MEM_COMMIT, PAGE_READWRITE) && VirtualProtect(data, bytes, PAGE_READWRITE, &before);
}

bool forbid_access(void* data, std::size_t bytes) {
  DWORD before = 0;
  return VirtualProtect(data, bytes, PAGE_NOACCESS, &before);
}

void discard(void* data, std::size_t bytes) { VirtualAlloc(data, bytes, MEM_RESET, PAGE_READWRITE); }

std::string last_error() {
  return std::error_code(static_cast<int>(GetLastError()), std::system_category()).message();
}

MappedFile map_new_file(const std::string& path, std::size_t bytes) {
  MappedFile made{.path = path};
  DeleteFileW(wide(path).c_str());
  // The writing handle is what is_held() finds. Others may read.
  const HANDLE file = CreateFileW(wide(path).c_str(), GENERIC_READ | GENERIC_WRITE, FILE_SHARE_READ, nullptr, CREATE_NEW,
                                  FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE) {
    made.reason = said("cannot make", path);
    return made;
  }
  const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READWRITE, static_cast<DWORD>(uint64_t{bytes} >> 32),
                                            static_cast<DWORD>(bytes), nullptr);
  if (!mapping) {
    made.reason = said(concat("no room for ", bytes, " bytes in"), path);
  } else if (made.data = MapViewOfFile(mapping, FILE_MAP_WRITE, 0, 0, bytes); !made.data) {
    made.reason = said("cannot map", path);
  }
  if (mapping) CloseHandle(mapping);  // the view keeps it
  if (made.data) {
    made.handle = reinterpret_cast<std::intptr_t>(file);
    return made;
  }
  CloseHandle(file);
  DeleteFileW(wide(path).c_str());
  return made;
}

void remove_file(MappedFile& file) {  // Windows removes no file that is mapped or open
  UnmapViewOfFile(file.data);
  CloseHandle(native(file));
  DeleteFileW(wide(file.path).c_str());
  file.data = nullptr, file.handle = -1;
}

void close_in_child(MappedFile&) {}

bool is_held(const std::string& path) {
  const HANDLE file = CreateFileW(wide(path).c_str(), GENERIC_READ, 0, nullptr, OPEN_EXISTING, FILE_ATTRIBUTE_NORMAL, nullptr);
  if (file == INVALID_HANDLE_VALUE) return true;
  CloseHandle(file);
  return false;
}

std::string make_folder(const std::string& path, bool of_this_user_alone) {
  if (!CreateDirectoryW(wide(path).c_str(), nullptr) && GetLastError() != ERROR_ALREADY_EXISTS)
    return said("cannot make", path);
  std::error_code ignored;  // folder_of_this_user() is the user's by its access list
  return of_this_user_alone && !std::filesystem::is_directory(wide(path), ignored) ? concat(path, " is not a folder") : "";
}

std::string folder_of_this_user() {
  const wchar_t* const local = _wgetenv(L"LOCALAPPDATA");
  std::error_code ignored;
  return ((local ? std::filesystem::path(local) : std::filesystem::temp_directory_path(ignored)) / "lowbit").string();
}

std::string write_file(const std::string& path, std::initializer_list<std::string_view> parts) {
  const HANDLE file = CreateFileW(wide(path).c_str(), GENERIC_WRITE, 0, nullptr, CREATE_ALWAYS, FILE_ATTRIBUTE_NORMAL, nullptr);
  bool whole = file != INVALID_HANDLE_VALUE;
  for (const std::string_view part : parts) {
    DWORD wrote = 0;
    whole = whole && WriteFile(file, part.data(), static_cast<DWORD>(part.size()), &wrote, nullptr) && wrote == part.size();
  }
  const std::string failed = whole ? "" : said("cannot write", path);
  if (file != INVALID_HANDLE_VALUE) CloseHandle(file);
  return failed;
}

bool allows_tiles() { return false; }
bool has(ArmFeature) { return false; }

}  // namespace lowbit::os
