// SPDX-License-Identifier: Apache-2.0
// The size of our own pool, and the number of parallel regions opened (parallel.hpp).
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit {

constexpr int kMaxThreads = 1024;
// 1..kMaxThreads, or 0 for the environment's choice. RuntimeError if threads are torch's.
LOWBIT_API void set_num_threads(int threads);
// Until callers have waited again, regions run as if no other process occupied the cores (crowded_cores.hpp). For tests.
LOWBIT_API void forget_crowded_cores();
// Regions opened by this thread so far; all regions of a team count as one.
LOWBIT_API int64_t opened_regions();

}  // namespace lowbit
