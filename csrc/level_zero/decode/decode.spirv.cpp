// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/decode/decode.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(decode_64, lz::kAttentionThreads, lz::DecodeCall) { lz::decode_split<64, false>(args); }
LOWBIT_KERNEL(decode_128, lz::kAttentionThreads, lz::DecodeCall) { lz::decode_split<128, false>(args); }
LOWBIT_KERNEL(decode_256, lz::kAttentionThreads, lz::DecodeCall) { lz::decode_split<256, false>(args); }
