// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/backward.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(row_statistics, lz::kAttentionThreads, lz::AttentionCall) { lz::row_statistics(args); }
LOWBIT_KERNEL(sink_gradient, lz::kAttentionThreads, lz::AttentionCall) { lz::sink_gradient(args); }
LOWBIT_KERNEL(sums_start, lz::kAttentionThreads, lz::SumsCall) { lz::sums_start(args); }
LOWBIT_KERNEL(sums_add, lz::kAttentionThreads, lz::SumsCall) { lz::sums_add(args); }
