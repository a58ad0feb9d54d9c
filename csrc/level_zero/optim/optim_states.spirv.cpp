// SPDX-License-Identifier: Apache-2.0
// encode_state and decode_state: <op>_<format>_<signed>.
#define LOWBIT_LANES 32
#include "cuda/optim/convert.cuh"
#include "level_zero/optim/call.hpp"

#define LOWBIT_CONVERT(op, what, format, is_signed, block)                                                     \
  LOWBIT_KERNEL(op##_##format##_##is_signed, lowbit::cuda::kStepThreads, lowbit::cuda::ConvertArgs) {             \
    lowbit::cuda::Convert<lowbit::StateFormat::format, is_signed, block, lowbit::level_zero::kEach>::what(args); \
  }
#define LOWBIT_CONVERTS(format, block)                                                                          \
  LOWBIT_CONVERT(encode_state, encode, format, 0, block) LOWBIT_CONVERT(encode_state, encode, format, 1, block) \
  LOWBIT_CONVERT(decode_state, decode, format, 0, block) LOWBIT_CONVERT(decode_state, decode, format, 1, block)

LOWBIT_CONVERTS(dynamic8, lowbit::level_zero::kCodesBlock)
LOWBIT_CONVERTS(dynamic4, lowbit::level_zero::kNibblesBlock)
LOWBIT_CONVERTS(float8, lowbit::level_zero::kCodesBlock)
