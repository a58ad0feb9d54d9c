// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/cudnn/hidden_rows.hpp"
#include "gpu/device/floats.cuh"
#include "gpu/device/reduce.cuh"

namespace lowbit::cuda {

struct Either {
  LOWBIT_INLINE int32_t operator()(int32_t a, int32_t b) const { return a | b; }
};

// A warp per row. Nearly every row ends at its first 32 keys.
LOWBIT_INLINE void clear_hidden_rows(const HiddenRowsCall& call) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * (kHiddenRowsThreads / 32) + threadIdx.x / 32;
  if (at >= call.rows) return;
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int64_t q = at % call.length, h = at / call.length % call.heads, b = at / call.length / call.heads;
  const int64_t of_row = b * call.bias_stride[0] + h * call.bias_stride[1] + q * call.bias_stride[2];
  const int64_t last = q + call.after < call.keys ? q + call.after : call.keys - 1;
  const int64_t first = call.window > 0 && q + call.after - call.window + 1 > 0 ? q + call.after - call.window + 1 : 0;
  for (int64_t k = first; k <= last; k += 32) {
    const int64_t mine = k + lane;
    const bool hides =
        mine > last ||
        load_as_float(call.bias, call.bias_dtype, of_row + mine * call.bias_stride[3]) == -__builtin_inff();
    if (of_warp(Either(), static_cast<int32_t>(!hides))) return;
  }
  const int64_t out = b * call.out.batch + h * call.out.head + q * call.out.row;
  for (int64_t column = lane; column < call.columns; column += 32)
    store_from_float(call.out.data, call.dtype, out + column, 0.0f);
  if (call.lse && lane == 0) call.lse[at] = -__builtin_inff();
}

}  // namespace lowbit::cuda
