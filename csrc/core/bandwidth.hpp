// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit {

// Memory read bandwidth in GB/s, the upper bound of a decode kernel. Each thread sums its share of `bytes` as `streams`
// sequential streams with prefetch; the best of `repeats` runs counts.
LOWBIT_API double read_bandwidth(int64_t bytes, int streams, int threads, int repeats);

}  // namespace lowbit
