// SPDX-License-Identifier: Apache-2.0
// Shared memory of Intel GPUs: the host reads and writes it in place, once the device has been waited for.
#pragma once

#include <cstddef>

#include "core/place.hpp"

namespace lowbit::level_zero {

// 256-byte aligned, not zeroed; null for 0 bytes and where there is no room. An Error where there is no such device.
LOWBIT_API void* allocate(Device device, std::size_t bytes);
LOWBIT_API void deallocate(Device device, void* pointer) noexcept;  // what runs there is waited for

// By the device, after all that was given to it before; done when this returns.
LOWBIT_API void copy(Device device, void* to, const void* from, std::size_t bytes);

}  // namespace lowbit::level_zero
