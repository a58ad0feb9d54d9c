// SPDX-License-Identifier: Apache-2.0
#include <crt_externs.h>
#include <dispatch/dispatch.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <mach-o/dyld.h>
#include <pthread.h>
#include <sys/sysctl.h>
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "core/error.hpp"
#include "core/os.hpp"
#include "core/os/posix.hpp"

namespace lowbit::os {

std::string path_of_library(void* library) {
  for (uint32_t i = 0; i < _dyld_image_count(); i++) {
    const char* const name = _dyld_get_image_name(i);
    void* const found = name ? dlopen(name, RTLD_LAZY | RTLD_NOLOAD) : nullptr;
    if (found) dlclose(found);
    if (found == library) return name;
  }
  return "";
}

namespace {
std::atomic<uint64_t> added{1};
[[gnu::constructor]] void count_libraries() {
  _dyld_register_func_for_add_image([](const mach_header*, intptr_t) { added++; });
}
}  // namespace

uint64_t libraries_loaded() { return added; }

std::string name_of_library(std::string_view stem) { return concat("@rpath/lib", stem, ".dylib"); }

int cores() { return static_cast<int>(std::thread::hardware_concurrency()); }

uint32_t thread_number() {
  uint64_t number = 0;
  pthread_threadid_np(nullptr, &number);
  return static_cast<uint32_t>(number);
}

std::string command_line() {
  std::string line;
  for (int i = 0; i < *_NSGetArgc(); i++) line.append((*_NSGetArgv())[i]).push_back('\0');
  return line;
}

void sleep_while(std::atomic<int>& word, int value) { word.wait(value); }
void wake(std::atomic<int>& word) { word.notify_one(); }

struct Semaphore::Native {
  dispatch_semaphore_t semaphore = dispatch_semaphore_create(0);  // macOS has no unnamed ones of POSIX
};

Semaphore::Semaphore() : native_(new Native) {}
Semaphore::~Semaphore() { dispatch_release(native_->semaphore); }
void Semaphore::post() { dispatch_semaphore_signal(native_->semaphore); }
void Semaphore::wait(int64_t max_ns) {
  dispatch_semaphore_wait(native_->semaphore, dispatch_time(DISPATCH_TIME_NOW, max_ns));
}

void prefer_huge_pages(void*, std::size_t) {}  // macOS has none for memory of malloc

int allocate_blocks(int descriptor, std::size_t bytes) {
  fstore_t store{};
  store.fst_flags = F_ALLOCATEALL, store.fst_posmode = F_PEOFPOSMODE, store.fst_length = static_cast<off_t>(bytes);
  const bool allocated = fcntl(descriptor, F_PREALLOCATE, &store) != -1;
  return allocated && ftruncate(descriptor, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
}
const int kMapAtOnce = 0;

bool allows_tiles() { return false; }

bool has(ArmFeature feature) {
  const auto is_set = [](const char* name) {
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value;
  };
  switch (feature) {
    case ArmFeature::simd: return is_set("hw.optional.AdvSIMD");
    case ArmFeature::dot_product: return is_set("hw.optional.arm.FEAT_DotProd");
    case ArmFeature::int8_matrix_product: return is_set("hw.optional.arm.FEAT_I8MM");
    case ArmFeature::bfloat16: return is_set("hw.optional.arm.FEAT_BF16");
  }
  return false;
}

}  // namespace lowbit::os
