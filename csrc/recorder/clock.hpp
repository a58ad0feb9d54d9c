// SPDX-License-Identifier: Apache-2.0
// The recorder's data of a thread, found once in a call, and its clock.
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit::recorder {

struct Moment {
  uint64_t cycles = 0, ns = 0;
};

struct Thread {
  uint32_t number = 0;  // gettid; 0: not asked yet
  int depth = 0;        // calls that it is inside of
  Moment anchor{};
};
LOWBIT_API Thread& this_thread();

// CLOCK_MONOTONIC in nanoseconds, within a few microseconds. Where the kernel itself counts cycles (clock source tsc)
// so do we, and ask it every half second: its own function waits until all work before it is done, which was 100 ns of
// a call that the recorder may cost 150.
uint64_t now_ns(Thread& thread);
inline uint64_t now_ns() { return now_ns(this_thread()); }

}  // namespace lowbit::recorder
