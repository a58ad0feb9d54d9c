// SPDX-License-Identifier: Apache-2.0
// torch and DLPack have one number for every device that is not theirs (PrivateUse1; 12). In a process it stands for
// one device of ours: the device that has claimed it, whose memory torch gets there.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/error.hpp"
#include "core/place.hpp"

namespace lowbit {

inline constexpr int kPrivateUse = 12;

// Memory of one device; blocks: allocated since the start. As in python/lowbit/devices/private_use/shim.cpp.
struct MemoryUsage {
  int64_t live_bytes = 0, peak_bytes = 0, live_blocks = 0, blocks = 0, capacity = 0;
};

// Memory of the devices of one type, by their numbers.
struct PrivateUse {
  DeviceType type;
  int (*device_count)();
  void* (*allocate)(int device, std::size_t bytes);  // null: for 0 bytes, and where there is no room
  void (*deallocate)(void* pointer) noexcept;
  void (*copy)(void* to, const void* from, std::size_t bytes);  // within a device, between two, from and to the host
  MemoryUsage (*usage)(int device);
  void (*reset_peak)(int device);
  // Between the two the host may touch the memory of a device: a run on that stream.
  void (*open)(int device, void* stream);
  void (*close)(int device);
};

LOWBIT_API void claim_private_use(const PrivateUse& device);  // for good; an Error if another device has
LOWBIT_API const PrivateUse& private_use();                   // an Error if none has

// Whether torch's and DLPack's numbers of a type mean it in this process.
LOWBIT_API bool owns_its_numbers(DeviceType type);

}  // namespace lowbit
