// SPDX-License-Identifier: Apache-2.0
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <linux/futex.h>
#include <sched.h>
#include <semaphore.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <fstream>
#include <iterator>

#include "core/error.hpp"
#include "core/os.hpp"
#include "core/os/posix.hpp"

namespace lowbit::os {

std::string path_of_library(void* library) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

uint64_t libraries_loaded() {
  uint64_t count = 0;
  auto first = [](dl_phdr_info* info, size_t, void* count) {
    return *static_cast<uint64_t*>(count) = info->dlpi_adds, 1;
  };
  dl_iterate_phdr(first, &count);
  return count;
}

std::string name_of_library(std::string_view stem) { return concat("lib", stem, ".so"); }

int cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
}

uint32_t thread_number() { return static_cast<uint32_t>(syscall(SYS_gettid)); }

std::string command_line() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The futex, on which the standard's atomic wait() stands too; that one would need a newer libstdc++.
void sleep_while(std::atomic<int>& word, int value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake(std::atomic<int>& word) { syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

struct Semaphore::Native {
  sem_t semaphore;
};

Semaphore::Semaphore() : native_(new Native) { sem_init(&native_->semaphore, 0, 0); }
Semaphore::~Semaphore() { sem_destroy(&native_->semaphore); }
void Semaphore::post() { sem_post(&native_->semaphore); }

void Semaphore::wait(int64_t max_ns) {
  timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  const int64_t ns = until.tv_nsec + max_ns;
  until.tv_sec += ns / 1000000000, until.tv_nsec = ns % 1000000000;
  while (sem_timedwait(&native_->semaphore, &until) != 0 && errno == EINTR) continue;
}

void prefer_huge_pages(void* data, std::size_t bytes) { madvise(data, bytes, MADV_HUGEPAGE); }

int allocate_blocks(int descriptor, std::size_t bytes) {
  return posix_fallocate(descriptor, 0, static_cast<off_t>(bytes));
}
const int kMapAtOnce = MAP_POPULATE;

// Linux (5.16 and later) grants a process the 8 KiB of tile registers per thread on request, for good and for its
// children.
bool allows_tiles() {
#if defined(__x86_64__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

bool has([[maybe_unused]] ArmFeature feature) {
#if defined(__aarch64__)
  const unsigned long one = getauxval(AT_HWCAP), two = getauxval(AT_HWCAP2);
  switch (feature) {
    case ArmFeature::simd: return one & HWCAP_ASIMD;
    case ArmFeature::dot_product: return one & HWCAP_ASIMDDP;
    case ArmFeature::int8_matrix_product: return two & HWCAP2_I8MM;
    case ArmFeature::bfloat16: return two & HWCAP2_BF16;
  }
#endif
  return false;
}

}  // namespace lowbit::os
