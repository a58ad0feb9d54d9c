// SPDX-License-Identifier: Apache-2.0
#include "sim/memory.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <string_view>

#include "core/os.hpp"
#include "sim/faults.hpp"
#include "sim/stray_access.hpp"

namespace lowbit::sim {
namespace {

constexpr std::size_t kAlignment = 256, kPage = 4096, kLarge = std::size_t{1} << 20;

std::size_t round_up(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

// With LOWBIT_SIM_GUARDS=1 (for kernels without any other bounds checks) a block is followed by at least kAlignment
// bytes of a pattern, which is verified after every run.
constexpr unsigned char kGuard = 0xa5;
bool has_guards() {
  static const char* const wanted = std::getenv("LOWBIT_SIM_GUARDS");
  return wanted && wanted == std::string_view("1");
}
std::size_t with_guard(std::size_t bytes) { return round_up(bytes, kAlignment) + (has_guards() ? kAlignment : 0); }

// One device. Blocks are offsets from `base`: `live` and `holes` are disjoint and cover [0, end). Pages of [0, touched)
// have been allocated at least once, and no other pages are ever made accessible.
struct Device {
  char* base = nullptr;
  std::mutex mutex;
  std::map<std::size_t, std::size_t> live, holes;  // offset -> bytes: as requested, as reserved
  std::size_t end = 0, touched = 0;
  int open = 0;
  MemoryUsage usage;

  void set_access(std::size_t from, std::size_t to, bool allowed) {
    if (from == to) return;
    check((allowed ? os::allow_access : os::forbid_access)(base + from, to - from), ErrorKind::runtime,
          "lowbit_sim: the system does not change access to memory: ", os::last_error());
  }

  void write_guard(std::size_t offset, std::size_t bytes) {
    const std::size_t from = offset / kPage * kPage, to = round_up(offset + with_guard(bytes), kPage);
    if (!open) set_access(from, to, true);
    std::memset(base + offset + bytes, kGuard, with_guard(bytes) - bytes);
    if (!open) set_access(from, to, false);
  }

  // Ends the process on damage: the bytes that were overwritten are unknown.
  void check_guards() const {
    for (const auto& [offset, bytes] : live)
      for (std::size_t i = bytes; i < with_guard(bytes); i++) {
        if (static_cast<unsigned char>(base[offset + i]) == kGuard) continue;
        std::fprintf(stderr, "lowbit_sim: a run wrote at byte %zu of a block of %zu bytes\n", i, bytes);
        std::abort();
      }
  }

  // The first hole that is large enough, else the end.
  std::size_t take(std::size_t bytes) {
    for (auto hole = holes.begin(); hole != holes.end(); ++hole) {
      if (hole->second < bytes) continue;
      const auto [offset, size] = *hole;
      holes.erase(hole);
      if (size > bytes) holes[offset + bytes] = size - bytes;
      return offset;
    }
    const std::size_t offset = end;
    if (bytes > static_cast<std::size_t>(usage.capacity) - end) return SIZE_MAX;
    const std::size_t needed = round_up(end + bytes, kPage);
    if (needed > touched) {
      if (open) set_access(touched, needed, true);
      touched = needed;
    }
    end += bytes;
    return offset;
  }

  // Merges a hole with its neighbours; whole pages of a large one are returned to the system.
  void give_back(std::size_t offset, std::size_t bytes) {
    if (bytes >= kLarge) {
      const std::size_t from = round_up(offset, kPage), to = (offset + bytes) / kPage * kPage;
      os::discard(base + from, to - from);
    }
    auto after = holes.lower_bound(offset);
    if (after != holes.end() && after->first == offset + bytes) bytes += after->second, after = holes.erase(after);
    if (after != holes.begin()) {
      const auto before = std::prev(after);
      if (before->first + before->second == offset)
        offset = before->first, bytes += before->second, holes.erase(before);
    }
    if (offset + bytes == end)
      end = offset;
    else
      holes[offset] = bytes;
  }
};

std::array<Device, kMaxDevices>& devices() {
  static auto* all = new std::array<Device, kMaxDevices>;  // tensors may be freed after static destructors
  return *all;
}

std::atomic<int> count{0};
char* lowest = nullptr;
std::size_t capacity = 0;  // bytes of one device: device i starts at lowest + i * capacity
thread_local int depth = 0;

Device& device_at(int device) {
  check(device >= 0 && device < device_count(), ErrorKind::value, "lowbit_sim: there is no device ", device,
        ", there are ", device_count());
  return devices()[static_cast<std::size_t>(device)];
}

}  // namespace

void start(int wanted, std::size_t bytes) {
  check(count == 0, ErrorKind::runtime, "lowbit_sim: the simulated devices run already");
  check(wanted >= 1 && wanted <= kMaxDevices, ErrorKind::value, "lowbit_sim: devices must be 1 to ", kMaxDevices,
        ", got ", wanted);
  check(bytes >= kLarge, ErrorKind::value, "lowbit_sim: memory must be at least ", kLarge, " bytes, got ", bytes);
  static constexpr PrivateUse kOurs{.type = DeviceType::simulated, .device_count = device_count, .allocate = allocate,
                                    .deallocate = deallocate, .copy = copy, .usage = usage, .reset_peak = reset_peak,
                                    .open = open, .close = close};
  claim_private_use(kOurs);
  capacity = round_up(bytes, kPage);
  const std::size_t all = capacity * static_cast<std::size_t>(wanted);
  void* const memory = os::reserve_memory(all);
  check(memory != nullptr, ErrorKind::runtime, "lowbit_sim: no address space for ", all, " bytes: ", os::last_error());
  lowest = static_cast<char*>(memory);
  for (int i = 0; i < wanted; i++) {
    Device& device = devices()[static_cast<std::size_t>(i)];
    device.base = lowest + capacity * static_cast<std::size_t>(i);
    device.usage.capacity = static_cast<int64_t>(capacity);
  }
  watch_for_stray_access(lowest, all, capacity);
  count = wanted;
}

int device_count() { return count.load(std::memory_order_acquire); }

void* allocate(int index, std::size_t bytes) {
  Device& device = device_at(index);
  if (bytes == 0) return nullptr;
  if (allocation_fails(index)) return nullptr;
  const std::lock_guard lock(device.mutex);
  if (bytes > static_cast<std::size_t>(device.usage.capacity)) return nullptr;
  const std::size_t size = round_up(bytes, kAlignment), offset = device.take(with_guard(bytes));
  if (offset == SIZE_MAX) return nullptr;
  device.live[offset] = bytes;
  if (has_guards()) device.write_guard(offset, bytes);
  MemoryUsage& usage = device.usage;
  usage.live_bytes += static_cast<int64_t>(size);
  usage.peak_bytes = std::max(usage.peak_bytes, usage.live_bytes);
  usage.live_blocks++, usage.blocks++;
  return device.base + offset;
}

void deallocate(void* pointer) noexcept {
  const int index = device_of(pointer);
  if (index < 0) return;
  Device& device = devices()[static_cast<std::size_t>(index)];
  const std::lock_guard lock(device.mutex);
  const auto block = device.live.find(static_cast<std::size_t>(static_cast<char*>(pointer) - device.base));
  if (block == device.live.end()) return;
  device.usage.live_bytes -= static_cast<int64_t>(round_up(block->second, kAlignment));
  device.usage.live_blocks--;
  const auto [offset, bytes] = *block;
  device.live.erase(block);
  device.give_back(offset, with_guard(bytes));
}

void copy(void* to, const void* from, std::size_t bytes) {
  const Open into(device_of(to)), out_of(device_of(from));
  if (bytes) std::memcpy(to, from, bytes);
}

int device_of(const void* pointer) {
  const int devices = device_count();
  if (devices == 0) return -1;
  const auto offset = reinterpret_cast<uintptr_t>(pointer) - reinterpret_cast<uintptr_t>(lowest);  // wraps around below
  return offset < capacity * static_cast<std::size_t>(devices) ? static_cast<int>(offset / capacity) : -1;
}

MemoryUsage usage(int index) {
  Device& device = device_at(index);
  const std::lock_guard lock(device.mutex);
  return device.usage;
}

void reset_peak(int index) {
  Device& device = device_at(index);
  const std::lock_guard lock(device.mutex);
  device.usage.peak_bytes = device.usage.live_bytes;
}

void open(int index, void* stream) {
  Device& device = device_at(index);
  if (depth == 0) launch(index, reinterpret_cast<intptr_t>(stream));
  const std::lock_guard lock(device.mutex);
  if (device.open == 0) device.set_access(0, device.touched, true);
  device.open++;
  depth++;
}

void close(int index) {
  Device& device = devices()[static_cast<std::size_t>(index)];
  depth--;
  const std::lock_guard lock(device.mutex);
  if (device.open == 1 && has_guards()) device.check_guards();
  if (--device.open == 0 && device.touched) os::forbid_access(device.base, device.touched);
}

Open::Open(int device, void* stream) : device_(device) {
  if (device >= 0) open(device, stream);
}

Open::~Open() {
  if (device_ >= 0) close(device_);
}

}  // namespace lowbit::sim
