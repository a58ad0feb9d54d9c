// SPDX-License-Identifier: Apache-2.0
// Shared memory of Intel GPUs: the host accesses it in place, once it has waited for the device.
#pragma once

#include <cstddef>

#include "core/private_use.hpp"

namespace lowbit::level_zero {

// Claims PrivateUse1 for the GPUs as device lowbit_ze; an Error if there is none, or if it is taken.
LOWBIT_API void start();

// 256-byte aligned, not zeroed; null for 0 bytes and if memory runs out. An Error if the device does not exist.
LOWBIT_API void* allocate(int device, std::size_t bytes);
LOWBIT_API void deallocate(void* pointer) noexcept;  // waits for the work on its device
LOWBIT_API int device_of(const void* pointer);       // -1: not our memory
LOWBIT_API MemoryUsage usage(int device);
LOWBIT_API void reset_peak(int device);

// Copies on the device, after all its earlier work, and waits.
LOWBIT_API void copy(void* to, const void* from, std::size_t bytes);
// Copies on this device, which may be torch's own xpu, whose memory the host cannot access.
void copy(Device device, void* to, const void* from, std::size_t bytes);

}  // namespace lowbit::level_zero
