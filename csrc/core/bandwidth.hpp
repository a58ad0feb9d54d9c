// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit {

// What this machine reads from memory, in GB/s: each thread sums its share of `bytes` as `streams` sequential streams
// with prefetch, best of `repeats`. The bound that a decode kernel is compared with.
LOWBIT_API double read_bandwidth(int64_t bytes, int streams, int threads, int repeats);

}  // namespace lowbit
