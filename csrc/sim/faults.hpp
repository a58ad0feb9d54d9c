// SPDX-License-Identifier: Apache-2.0
// Faults of a simulated device, on demand. A program must survive them on a real device, and can hardly provoke
// them there.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/error.hpp"

namespace lowbit::sim {

// memory: allocations find no room. launch: kernels do not start. lost: a kernel does not start, and from then on
// nothing on that device does until recover(). slow: launches take longer.
enum class Fault { memory, launch, lost, slow };
inline constexpr std::string_view kFaultNames[] = {"memory", "launch", "lost", "slow"};

// The next `after` allocations or launches go well, then `times` of them do not. A slow launch takes
// `microseconds` more.
struct Injection {
  int64_t after = 0, times = 1, microseconds = 0;
};

LOWBIT_API void inject(int device, Fault fault, const Injection& injection);
LOWBIT_API void recover(int device);      // no fault is left, a lost device is back; its memory is as it was
LOWBIT_API int64_t launches(int device);  // since the start
LOWBIT_API int64_t launches(int device, int64_t stream);

// Asked by memory.cpp.
bool allocation_fails(int device);        // throws Error on a lost device
void launch(int device, int64_t stream);  // counts; throws Error where it fails

}  // namespace lowbit::sim
