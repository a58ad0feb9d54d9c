// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/backward.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(keys_64, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_backward<64, false, true>(args); }
LOWBIT_KERNEL(keys_128, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_backward<128, false, true>(args); }
LOWBIT_KERNEL(queries_64, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_backward<64, false, false>(args); }
LOWBIT_KERNEL(queries_128, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_backward<128, false, false>(args); }
