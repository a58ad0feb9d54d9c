// SPDX-License-Identifier: Apache-2.0
// The recorder's data of a thread, looked up once per call, and its clock.
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit::recorder {

struct Moment {
  uint64_t cycles = 0, ns = 0;
};

struct Thread {
  uint32_t number = 0;  // the system's; 0: not read yet
  int depth = 0;        // number of calls that the thread is inside of
  Moment anchor{};
};
LOWBIT_API Thread& this_thread();

// CLOCK_MONOTONIC (elsewhere the standard's steady clock) in nanoseconds, within a few microseconds. If the kernel's clock source is tsc, the clock counts
// cycles and synchronizes with the kernel every half second: clock_gettime waits until all earlier work is done, which
// would be most of what the recorder may add to a call.
uint64_t now_ns(Thread& thread);
inline uint64_t now_ns() { return now_ns(this_thread()); }

}  // namespace lowbit::recorder
