// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/memory.hpp"

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "core/once.hpp"
#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {
namespace {

struct Block {
  int device;
  std::size_t bytes;
};

struct Blocks {
  std::mutex mutex;
  std::map<const char*, Block> live;
  std::vector<MemoryUsage> usage;  // one per device
};

// The blocks of all devices; never freed: tensors may be freed after static destructors.
Blocks& blocks() {
  static std::atomic<Blocks* const*> kept{nullptr};
  return *made_once(kept, [] {
    auto* made = new Blocks;
    for (const Gpu& one : gpus()) made->usage.push_back({.capacity = one.memory_bytes});
    return made;
  });
}

Device device_at(int device) { return {DeviceType::level_zero, static_cast<int16_t>(device)}; }

// The block that contains an address; null for memory that is not ours.
const Block* block_of(const Blocks& all, const void* pointer) {
  const auto* const address = static_cast<const char*>(pointer);
  const auto after = all.live.upper_bound(address);
  if (after == all.live.begin()) return nullptr;
  const auto& [begin, block] = *std::prev(after);
  return address < begin + block.bytes ? &block : nullptr;
}

void wait_for(int device, void*) { wait(device_at(device)); }
void nothing(int) {}

}  // namespace

void start() {
  static constexpr PrivateUse kOurs{.type = DeviceType::level_zero, .device_count = device_count, .allocate = allocate,
                                    .deallocate = deallocate, .copy = copy, .usage = usage, .reset_peak = reset_peak,
                                    .open = wait_for, .close = nothing};
  gpus();
  claim_private_use(kOurs);
}

void* allocate(int device, std::size_t bytes) {
  const Gpu& on = gpu(device_at(device));
  if (bytes == 0) return nullptr;
  const DeviceMemoryDescription of_device{};
  const HostMemoryDescription of_host{};
  void* pointer = nullptr;
  const Result failed = api().allocate_shared(on.context, &of_device, &of_host, bytes, 256, on.handle, &pointer);
  if (failed == kOutOfDeviceMemory || failed == kOutOfHostMemory || failed == kUnsupportedSize) return nullptr;
  ensure(failed, concat(name_of(device_at(device)), ": allocating ", bytes, " bytes"));
  Blocks& all = blocks();
  const std::lock_guard lock(all.mutex);
  all.live[static_cast<const char*>(pointer)] = {device, bytes};
  MemoryUsage& used = all.usage[static_cast<std::size_t>(device)];
  used.live_bytes += static_cast<int64_t>(bytes), used.live_blocks++, used.blocks++;
  if (used.peak_bytes < used.live_bytes) used.peak_bytes = used.live_bytes;
  return pointer;
}

void deallocate(void* pointer) noexcept {
  if (!pointer || is_forked()) return;  // in a child: the parent frees it
  Blocks& all = blocks();
  int device;
  {
    const std::lock_guard lock(all.mutex);
    const auto found = all.live.find(static_cast<const char*>(pointer));
    if (found == all.live.end()) return;
    device = found->second.device;
    MemoryUsage& used = all.usage[static_cast<std::size_t>(device)];
    used.live_bytes -= static_cast<int64_t>(found->second.bytes), used.live_blocks--;
    all.live.erase(found);
  }
  try {
    wait(device_at(device));
    api().free(gpu(device_at(device)).context, pointer);
  } catch (const Error&) {  // a lost device cannot free anything
  }
}

int device_of(const void* pointer) {
  Blocks& all = blocks();
  const std::lock_guard lock(all.mutex);
  const Block* const block = block_of(all, pointer);
  return block ? block->device : -1;
}

MemoryUsage usage(int device) {
  gpu(device_at(device));
  Blocks& all = blocks();
  const std::lock_guard lock(all.mutex);
  return all.usage[static_cast<std::size_t>(device)];
}

void reset_peak(int device) {
  gpu(device_at(device));
  Blocks& all = blocks();
  const std::lock_guard lock(all.mutex);
  MemoryUsage& used = all.usage[static_cast<std::size_t>(device)];
  used.peak_bytes = used.live_bytes;
}

void copy(Device device, void* to, const void* from, std::size_t bytes) {
  const Gpu& on = gpu(device);
  {
    const std::lock_guard lock(*on.mutex);
    ensure(api().append_copy(on.list, to, from, bytes, nullptr, 0, nullptr),
           concat(name_of(device), ": copying ", bytes, " bytes"));
    ensure(api().append_barrier(on.list, nullptr, 0, nullptr), "zeCommandListAppendBarrier");
  }
  wait(device);
}

void copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  int device = device_of(to);
  if (device < 0) device = device_of(from);
  if (device < 0) std::memcpy(to, from, bytes);
  else copy(device_at(device), to, from, bytes);
}

}  // namespace lowbit::level_zero
