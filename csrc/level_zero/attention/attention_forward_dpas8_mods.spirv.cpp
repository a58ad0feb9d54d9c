// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 8
#include "level_zero/attention/forward_dpas.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(forward_64, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_forward_dpas<64, true>(args); }
LOWBIT_KERNEL(forward_128, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_forward_dpas<128, true>(args); }
LOWBIT_KERNEL(forward_256, lz::kAttentionThreads, lz::AttentionCall) { lz::attention_forward_dpas<256, true>(args); }
