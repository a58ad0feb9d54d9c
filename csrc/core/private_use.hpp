// SPDX-License-Identifier: Apache-2.0
// torch and DLPack have one number for all devices unknown to them (PrivateUse1; 12). Within a process it stands for
// one of our devices, the one that claimed it and provides its memory to torch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/error.hpp"
#include "core/place.hpp"

namespace lowbit {

inline constexpr int kPrivateUse = 12;

// Memory of one device; blocks: allocations since the start. As in python/lowbit/devices/private_use/shim.cpp.
struct MemoryUsage {
  int64_t live_bytes = 0, peak_bytes = 0, live_blocks = 0, blocks = 0, capacity = 0;
};

// Memory functions of the devices of one type; `device` is an index.
struct PrivateUse {
  DeviceType type;
  int (*device_count)();
  void* (*allocate)(int device, std::size_t bytes);  // null for 0 bytes, and if memory runs out
  void (*deallocate)(void* pointer) noexcept;
  void (*copy)(void* to, const void* from, std::size_t bytes);  // between devices or host and device, or within one
  MemoryUsage (*usage)(int device);
  void (*reset_peak)(int device);
  // Between open and close the host may access the memory of a device: a kernel run on that stream.
  void (*open)(int device, void* stream);
  void (*close)(int device);
};

LOWBIT_API void claim_private_use(const PrivateUse& device);  // permanent; an Error if another device has claimed it
LOWBIT_API const PrivateUse& private_use();                   // an Error if none has

// Whether the numbers of a type in torch and DLPack mean this type in this process.
LOWBIT_API bool owns_its_numbers(DeviceType type);

}  // namespace lowbit
