// SPDX-License-Identifier: Apache-2.0
// Injected faults of a simulated device. A program must survive them on a real device, where it can
// hardly provoke them.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/error.hpp"

namespace lowbit::sim {

// memory: allocations fail. launch: kernels do not start. lost: a kernel does not start, and nothing else works on the
// device until recover(). slow: launches take longer.
enum class Fault { memory, launch, lost, slow };
inline constexpr std::string_view kFaultNames[] = {"memory", "launch", "lost", "slow"};

// The next `after` allocations or launches succeed, then `times` of them fail. A slow launch
// takes `microseconds` longer.
struct Injection {
  int64_t after = 0, times = 1, microseconds = 0;
};

LOWBIT_API void inject(int device, Fault fault, const Injection& injection);
LOWBIT_API void recover(int device);      // clears all faults; a lost device works again, its memory unchanged
LOWBIT_API int64_t launches(int device);  // number since the start
LOWBIT_API int64_t launches(int device, int64_t stream);

// Called by memory.cpp.
bool allocation_fails(int device);        // throws Error on a lost device
void launch(int device, int64_t stream);  // counts; throws Error on a fault

}  // namespace lowbit::sim
