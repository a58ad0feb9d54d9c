// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/scores.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(write_table, lz::kAttentionThreads, lz::TableCall) { lz::write_table(args); }
LOWBIT_KERNEL(make_classes, lz::kAttentionThreads, lz::AttentionCall) {
  lowbit::gpu::make_classes(args, [] { lz::barrier_of_all_memory(); });
}
