// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/decode/convert.hpp"
#include "level_zero/decode/decode.hpp"

namespace lz = lowbit::level_zero;
LOWBIT_KERNEL(decode_combine, lz::kAttentionThreads, lz::DecodeCall) { lz::decode_combine(args); }
LOWBIT_KERNEL(kv_quantize, lz::kAttentionThreads, lz::KvCodesCall) { lz::kv_quantize(args); }
LOWBIT_KERNEL(kv_dequantize, lz::kAttentionThreads, lz::KvCodesCall) { lz::kv_dequantize(args); }
