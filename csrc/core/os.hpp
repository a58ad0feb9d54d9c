// SPDX-License-Identifier: Apache-2.0
// What differs between operating systems. The build compiles core/os/posix.cpp with linux.cpp or macos.cpp, or
// windows.cpp; no other file asks which system it is.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>

namespace lowbit::os {

// Shared libraries. A handle is null if there is none.
void* open_library(const char* path, bool shows_its_names = false);  // shows_its_names: to libraries opened later
void* loaded_library(const char* name);                              // one that the process has loaded already
std::string why_not_opened();                                        // of this thread's last open_library
void* find_symbol(void* library, const char* name);  // library null: in the libraries whose names all others see
std::string path_of_library(void* library);          // "" if the system does not say
std::string file_of(const void* code);               // the library that holds this address, or ""
// How many libraries this process has loaded so far, never 0. Takes 0.1 us on Linux; a look-up by name takes 20 (Zen 5).
uint64_t libraries_loaded();
// The name under which a library of torch's package is loaded: libtorch_cpu.so of torch_cpu.
std::string name_of_library(std::string_view stem);
extern const char kBetweenPaths;  // in a variable that lists folders

// Throws a pybind11::builtin_exception that sets this error of Python ("PyExc_ValueError"), as code of the compiler that
// torch is built with throws it. Callers have nothing to clean up and catch nothing: on Windows that compiler is another one.
[[noreturn]] void throw_python_error(const char* type, const char* text);

// Threads and processes.
int cores();  // that this process may use; 0 if the system does not say
uint32_t thread_number();
int process_number();
std::string host_name();
std::string command_line();                // arguments, each zero-terminated
void in_forked_child(void (*function)());  // called in each child that is forked from now on; Windows has no fork
void start_thread_without_signals(void (*function)());  // the program's signals go to its own threads
// Sleeps while the word has this value and nobody wakes it; may return early.
void sleep_while(std::atomic<int>& word, int value);
void wake(std::atomic<int>& word);

// `handler` and what handled the signal before are called when a user sends SIGUSR1. Windows has no such signal.
void on_user_signal(void (*handler)());
// `handler` is called with the address of an access that the processor refused, before what handled such faults before.
// It may call say() alone of all functions that print.
void on_fault(void (*handler)(const void* address));
void say(std::string_view text);  // on stderr

// A semaphore to which a signal handler may post.
class Semaphore {
 public:
  Semaphore();
  ~Semaphore();
  Semaphore(const Semaphore&) = delete;
  Semaphore& operator=(const Semaphore&) = delete;
  void post();
  void wait(int64_t max_ns);

 private:
  struct Native;
  std::unique_ptr<Native> native_;
};

// Memory. Addresses and sizes are multiples of a page.
void prefer_huge_pages(void* data, std::size_t bytes);
void* reserve_memory(std::size_t bytes);  // address space without access; null if there is none
bool allow_access(void* data, std::size_t bytes);   // zeros where it is the first time
bool forbid_access(void* data, std::size_t bytes);  // contents stay
void discard(void* data, std::size_t bytes);        // contents may be lost, the memory may serve others
std::string last_error();                           // why one of these failed

// Files. A returned text says why something failed, or is empty.
struct MappedFile {
  void* data = nullptr;  // null: `reason` says why
  std::string path = {}, reason = {};
  std::intptr_t handle = -1;
};
// Creates a file of zeros and maps it, with its blocks allocated, so that writes to the mapping cannot run out of disk.
// A file of this name is replaced. It is held until the process ends.
MappedFile map_new_file(const std::string& path, std::size_t bytes);
void remove_file(MappedFile& file);
void close_in_child(MappedFile& file);           // the parent still holds it
bool is_held(const std::string& path);           // by a live process, or not readable
std::string make_folder(const std::string& path, bool of_this_user_alone);
std::string folder_of_this_user();               // for files that need not outlive the system, in memory if it can be
std::string write_file(const std::string& path, std::initializer_list<std::string_view> parts);  // for this user

// The processor.
bool allows_tiles();  // AMX's tile registers, for which Linux wants to be asked
enum class ArmFeature { simd, dot_product, int8_matrix_product, bfloat16 };
bool has(ArmFeature feature);

}  // namespace lowbit::os
