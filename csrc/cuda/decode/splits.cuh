// SPDX-License-Identifier: Apache-2.0
// Splits of the keys, of each of which the largest score, the sum and the weighted values of a row are there,
// to its result.
#pragma once

#include "cuda/decode/rotate.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE float minus_infinity() { return -__builtin_inff(); }

// The softmax of a row from the parts that it was made in: each is multiplied by its factor and divided by the sum.
struct Softmax {
  float base, of_sink;
  LOWBIT_INLINE Softmax(const DecodeCall& call, int64_t h, float largest) {
    const float sink = call.sink ? call.sink[h] : minus_infinity(), top = fmaxf(sink, largest);
    base = top == minus_infinity() ? 0.0f : top, of_sink = power_of_2((sink - base) * kLog2e);
  }
  // -1: no key was seen, and the part may be nan.
  LOWBIT_INLINE float factor(float largest, float total) const {
    return largest != minus_infinity() || total != 0.0f ? power_of_2((largest - base) * kLog2e) : -1.0f;
  }
  LOWBIT_INLINE void store_lse(const DecodeCall& call, int64_t row, float sum) const {
    if (call.lse) call.lse[row] = sum == 0.0f ? minus_infinity() : base + logf(sum);
  }
};
LOWBIT_INLINE float inverse(float sum) { return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum); }

// out = sum over splits of exp(largest - top) * partial / sum over splits of exp(largest - top) * total, in the order
// of the splits; a CTA for each row. The factors of all splits are there before the first sum, so that no load of a
// partial result waits for a branch.
LOWBIT_INLINE void combine(const DecodeCall& call) {
  LOWBIT_SHARED(float, factor, [kMostSplits]);
  const int64_t row = blockIdx.x, l = row % call.length, h = row / call.length % call.heads,
                b = row / call.length / call.heads, padded = kv_padded(call.v_columns);
  const float *largest = call.largest + row * call.splits, *totals = call.total + row * call.splits;
  float top = minus_infinity();
  for (int s = 0; s < call.splits; s++) top = fmaxf(top, largest[s]);
  const Softmax all(call, h, top);
  for (int s = static_cast<int>(threadIdx.x); s < call.splits; s += kDecodeThreads)
    factor[s] = all.factor(largest[s], totals[s]);
  __syncthreads();
  float total = all.of_sink;
  for (int s = 0; s < call.splits; s++) total += fmaxf(factor[s], 0.0f) * totals[s];
  const float by = inverse(total);
  for (int c = static_cast<int>(threadIdx.x); c < call.v_columns; c += kDecodeThreads) {
    const float* partial = call.partial + row * call.splits * padded + c;
    float sum = 0;
#pragma unroll 8
    for (int s = 0; s < call.splits; s++) {
      const float next = __fmaf_rn(factor[s], partial[s * padded], sum);
      sum = factor[s] < 0.0f ? sum : next;
    }
    store_real(call.out.data, call.out_dtype, b * call.out.batch + h * call.out.head + l * call.out.row + c, sum * by);
  }
  if (threadIdx.x == 0) all.store_lse(call, row, total);
}

}  // namespace lowbit::cuda
