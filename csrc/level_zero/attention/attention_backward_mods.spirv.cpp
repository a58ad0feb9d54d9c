// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/backward.hpp"

namespace lz = lowbit::level_zero;
using lz::AttentionCall, lz::kAttentionThreads;
LOWBIT_KERNEL(keys_64, kAttentionThreads, AttentionCall) { lz::attention_backward<64, true, true>(args); }
LOWBIT_KERNEL(keys_128, kAttentionThreads, AttentionCall) { lz::attention_backward<128, true, true>(args); }
LOWBIT_KERNEL(keys_256, kAttentionThreads, AttentionCall) { lz::attention_backward<256, true, true>(args); }
LOWBIT_KERNEL(queries_64, kAttentionThreads, AttentionCall) { lz::attention_backward<64, true, false>(args); }
LOWBIT_KERNEL(queries_128, kAttentionThreads, AttentionCall) { lz::attention_backward<128, true, false>(args); }
LOWBIT_KERNEL(queries_256, kAttentionThreads, AttentionCall) { lz::attention_backward<256, true, false>(args); }
