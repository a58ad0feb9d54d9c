// SPDX-License-Identifier: Apache-2.0
#include "core/os/posix.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "core/error.hpp"
#include "core/os.hpp"

// torch's Python layer converts any std::exception to a RuntimeError (before 2.15 std::invalid_argument to a
// ValueError), but calls set_error() of a pybind11::builtin_exception. The C++ runtime matches that type by name, so it
// is declared here as all versions of pybind11 declare it. Without Python it is a std::runtime_error with our text.
namespace pybind11 {
class __attribute__((visibility("default"))) builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace lowbit::os {
namespace {

class PythonException final : public pybind11::builtin_exception {
 public:
  PythonException(const char* type, const char* text) : builtin_exception(text), type_(type) {}
  void set_error() const override {
    using SetString = void (*)(void* type, const char* text);
    const auto set_string = reinterpret_cast<SetString>(find_symbol(nullptr, "PyErr_SetString"));
    auto* const type = static_cast<void**>(find_symbol(nullptr, type_));
    if (set_string && type) set_string(*type, what());
  }

 private:
  const char* type_;
};

std::string said(std::string_view what, const std::string& path) {
  return concat(what, " ", path, ": ", std::strerror(errno));
}

// A handler that runs before the one that was there.
struct Installed {
  int signal;
  struct sigaction before {};
};
Installed user_signal{SIGUSR1};
void (*of_user)() = nullptr;

void on_user(int number, siginfo_t* info, void* context) {
  of_user();
  const struct sigaction& before = user_signal.before;
  if (before.sa_flags & SA_SIGINFO) {
    if (before.sa_sigaction) before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  }
}

Installed faults[] = {{SIGSEGV}, {SIGBUS}};  // memory without access: the first on Linux, the second on macOS
void (*of_fault)(const void*) = nullptr;

void on_signal_of_fault(int number, siginfo_t* info, void*) {
  of_fault(info->si_addr);
  // The access is retried after this returns, and reaches the handler that was there.
  for (const Installed& fault : faults)
    if (fault.signal == number) sigaction(number, &fault.before, nullptr);
}

void install(Installed& of, void (*handler)(int, siginfo_t*, void*), int flags) {
  struct sigaction action {};
  action.sa_sigaction = handler, action.sa_flags = SA_SIGINFO | SA_ONSTACK | flags;
  sigemptyset(&action.sa_mask);
  sigaction(of.signal, &action, &of.before);
}

}  // namespace

void* open_library(const char* path, bool shows_its_names) {
  return dlopen(path, RTLD_NOW | (shows_its_names ? RTLD_GLOBAL : RTLD_LOCAL));
}
void* loaded_library(const char* name) { return dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD); }

std::string why_not_opened() {
  const char* const reason = dlerror();
  return reason ? reason : "";
}

void* find_symbol(void* library, const char* name) { return dlsym(library ? library : RTLD_DEFAULT, name); }

std::string file_of(const void* code) {
  Dl_info found{};
  return dladdr(code, &found) && found.dli_fname ? found.dli_fname : "";
}

const char kBetweenPaths = ':';

void throw_python_error(const char* type, const char* text) { throw PythonException(type, text); }

int process_number() { return getpid(); }

std::string host_name() {
  char name[256] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

void in_forked_child(void (*function)()) { pthread_atfork(nullptr, nullptr, function); }

void start_thread_without_signals(void (*function)()) {
  sigset_t all, kept;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &kept);
  std::thread(function).detach();
  pthread_sigmask(SIG_SETMASK, &kept, nullptr);
}

void on_user_signal(void (*handler)()) {
  of_user = handler;
  install(user_signal, on_user, SA_RESTART);
}

void on_fault(void (*handler)(const void* address)) {
  of_fault = handler;
  for (Installed& fault : faults) install(fault, on_signal_of_fault, 0);
}

void say(std::string_view text) {
  if (write(STDERR_FILENO, text.data(), text.size()) < 0) return;
}

void* reserve_memory(std::size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}
bool allow_access(void* data, std::size_t bytes) { return mprotect(data, bytes, PROT_READ | PROT_WRITE) == 0; }
bool forbid_access(void* data, std::size_t bytes) { return mprotect(data, bytes, PROT_NONE) == 0; }
void discard(void* data, std::size_t bytes) { madvise(data, bytes, MADV_DONTNEED); }
std::string last_error() { return std::strerror(errno); }

MappedFile map_new_file(const std::string& path, std::size_t bytes) {
  MappedFile made{.path = path};
  unlink(path.c_str());
  const int descriptor = open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (descriptor < 0) {
    made.reason = said("cannot make", path);
    return made;
  }
  flock(descriptor, LOCK_EX | LOCK_NB);  // fails without locks: then the file never counts as held
  if (const int failed = allocate_blocks(descriptor, bytes)) {
    errno = failed;
    made.reason = said(concat("no room for ", bytes, " bytes in"), path);
  } else if (void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | kMapAtOnce, descriptor, 0);
             data == MAP_FAILED) {
    made.reason = said("cannot map", path);
  } else {
    made.data = data, made.handle = descriptor;
    return made;
  }
  unlink(path.c_str());
  close(descriptor);
  return made;
}

void remove_file(MappedFile& file) { unlink(file.path.c_str()); }

void close_in_child(MappedFile& file) {
  if (file.handle >= 0) close(static_cast<int>(file.handle));
  file.handle = -1;
}

bool is_held(const std::string& path) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  if (descriptor < 0) return true;
  const bool held = flock(descriptor, LOCK_SH | LOCK_NB) != 0;  // shared: two that ask at once do not see each other
  close(descriptor);
  return held;
}

// Another user's folder in /tmp could be read or replaced.
std::string make_folder(const std::string& path, bool of_this_user_alone) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return said("cannot make", path);
  struct stat found;
  if (lstat(path.c_str(), &found) != 0) return said("cannot look at", path);
  if (!of_this_user_alone) return "";
  if (!S_ISDIR(found.st_mode)) return concat(path, " is not a folder");
  if (found.st_uid != geteuid() || (found.st_mode & 077) != 0)
    return concat(path, " must belong to this user alone (mode 0700)");
  return "";
}

std::string folder_of_this_user() {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  if (runtime && *runtime) return concat(runtime, "/lowbit");
  return concat(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp", "/lowbit-", geteuid());
}

std::string write_file(const std::string& path, std::initializer_list<std::string_view> parts) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  const auto is_written = [file](std::string_view left) {
    while (!left.empty()) {
      const ssize_t wrote = write(file, left.data(), left.size());
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote <= 0) return false;
      left.remove_prefix(static_cast<std::size_t>(wrote));
    }
    return true;
  };
  bool whole = file >= 0;
  for (const std::string_view part : parts) whole = whole && is_written(part);
  const std::string failed = whole ? "" : said("cannot write", path);
  if (file >= 0) close(file);
  return failed;
}

}  // namespace lowbit::os
