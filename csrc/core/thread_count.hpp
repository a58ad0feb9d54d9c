// SPDX-License-Identifier: Apache-2.0
// How many threads our own pool has (parallel.hpp).
#pragma once

#include "core/error.hpp"

namespace lowbit {

constexpr int kMostThreads = 1024;
// 1..kMostThreads, or 0: as the environment says. RuntimeError where threads are torch's.
LOWBIT_API void set_num_threads(int threads);

}  // namespace lowbit
