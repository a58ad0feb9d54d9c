// SPDX-License-Identifier: Apache-2.0
#include "level_zero/runtime/memory.hpp"

#include "level_zero/runtime/driver.hpp"

namespace lowbit::level_zero {

void* allocate(Device device, std::size_t bytes) {
  const Gpu& on = gpu(device);
  if (bytes == 0) return nullptr;
  const DeviceMemoryDescription of_device{};
  const HostMemoryDescription of_host{};
  void* pointer = nullptr;
  const Result failed = api().allocate_shared(on.context, &of_device, &of_host, bytes, 256, on.handle, &pointer);
  if (failed == kOutOfDeviceMemory || failed == kOutOfHostMemory) return nullptr;
  ensure(failed, concat(name_of(device), ": allocating ", bytes, " bytes"));
  return pointer;
}

void deallocate(Device device, void* pointer) noexcept {
  if (!pointer) return;
  try {
    wait(device);
    api().free(gpu(device).context, pointer);
  } catch (const Error&) {  // of a lost device nothing can be given back
  }
}

void copy(Device device, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  {
    const Gpu& on = gpu(device);
    const std::lock_guard lock(*on.mutex);
    ensure(api().append_copy(on.list, to, from, bytes, nullptr, 0, nullptr),
           concat(name_of(device), ": copying ", bytes, " bytes"));
    ensure(api().append_barrier(on.list, nullptr, 0, nullptr), "zeCommandListAppendBarrier");
  }
  wait(device);
}

}  // namespace lowbit::level_zero
