// SPDX-License-Identifier: Apache-2.0
// encode_state and decode_state: <op>_<format>_<signed>.
#define LOWBIT_LANES 16
#include "gpu/optim/convert.cuh"
#include "level_zero/optim/call.hpp"

#define LOWBIT_CONVERT(op, what, format, is_signed)                                                             \
  LOWBIT_KERNEL(op##_##format##_##is_signed, lowbit::gpu::kStepThreads, lowbit::gpu::ConvertArgs) {           \
    constexpr auto kFormat = lowbit::StateFormat::format;                                                       \
    using lowbit::level_zero::block_of, lowbit::level_zero::kEach;                                              \
    lowbit::gpu::Convert<kFormat, is_signed, block_of(kFormat), kEach>::what(args);                            \
  }
#define LOWBIT_CONVERTS(format)                                                                   \
  LOWBIT_CONVERT(encode_state, encode, format, 0) LOWBIT_CONVERT(encode_state, encode, format, 1) \
  LOWBIT_CONVERT(decode_state, decode, format, 0) LOWBIT_CONVERT(decode_state, decode, format, 1)

LOWBIT_CONVERTS(dynamic8)
LOWBIT_CONVERTS(dynamic4)
LOWBIT_CONVERTS(float8)
