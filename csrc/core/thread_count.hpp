// SPDX-License-Identifier: Apache-2.0
// How many threads our own pool has, and how many parallel regions were opened (parallel.hpp).
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit {

constexpr int kMostThreads = 1024;
// 1..kMostThreads, or 0: as the environment says. RuntimeError where threads are torch's.
LOWBIT_API void set_num_threads(int threads);
// Regions that this thread has opened so far; those of a team are one.
LOWBIT_API int64_t opened_regions();

}  // namespace lowbit
