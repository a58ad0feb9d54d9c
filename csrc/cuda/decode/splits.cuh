// SPDX-License-Identifier: Apache-2.0
// Combines splits of the keys, each with the largest score, the sum and the weighted values of a row, into the result.
#pragma once

#include "cuda/decode/rotate.cuh"
#include "gpu/device/reduce.cuh"

namespace lowbit::cuda {

struct LargerFloat {
  LOWBIT_INLINE float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct FloatTotal {
  LOWBIT_INLINE float operator()(float a, float b) const { return a + b; }
};

LOWBIT_INLINE float minus_infinity() { return -__builtin_inff(); }

// The reference of powers: the largest score, if there is one.
LOWBIT_INLINE float softmax_base(float largest) { return largest == minus_infinity() ? 0.0f : largest; }

// The softmax of a row from its parts: each is multiplied by its factor and divided by the sum.
struct Softmax {
  float base, of_sink;
  LOWBIT_INLINE Softmax(const DecodeCall& call, int64_t h, float largest) {
    const float sink = call.sink ? call.sink[h] : minus_infinity();
    base = softmax_base(fmaxf(sink, largest)), of_sink = power_of_2((sink - base) * kLog2e);
  }
  LOWBIT_INLINE float factor(float largest) const { return power_of_2((largest - base) * kLog2e); }
  LOWBIT_INLINE void store_lse(const DecodeCall& call, int64_t row, float sum) const {
    if (call.lse) call.lse[row] = sum == 0.0f ? minus_infinity() : base + logf(sum);
  }
};
LOWBIT_INLINE float inverse(float sum) { return sum == 0.0f ? 0.0f : __fdiv_rn(1.0f, sum); }

// out = sum over splits of exp(largest - top) * partial / sum over splits of exp(largest - top) * total; one CTA per
// row. A lane has the factor of a split. A warp adds every fourth split, four columns per lane, and no load of a
// partial result waits for another. Then the sums of the warps are added.
LOWBIT_INLINE void combine(const DecodeCall& call) {
  static_assert(kMaxSplits <= 32);
  LOWBIT_SHARED(float, sums, [kDecodeWarps][kMaxHeadDim]);
  const int row = static_cast<int>(blockIdx.x), lane = lane_of_warp(), warp = warp_of_cta();
  const int l = row % call.length, h = row / call.length % call.heads, b = row / call.length / call.heads;
  const int64_t first = static_cast<int64_t>(row) * call.splits, padded = kv_padded(call.v_columns);
  const float largest = lane < call.splits ? call.largest[first + lane] : minus_infinity(),
              total = lane < call.splits ? call.total[first + lane] : 0.0f;
  const Softmax all(call, h, of_warp(LargerFloat(), largest));
  const float factor = all.factor(largest), sum = all.of_sink + of_warp(FloatTotal(), factor * total),
              by = inverse(sum);
  for (int from = 0; from < padded; from += 128) {
    const int column = from + 4 * lane;
    constexpr int kEach = kMaxSplits / kDecodeWarps;
    float of_column[4] = {};
    uint4 parts[kEach];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int split = i * kDecodeWarps + warp;
      const float* at = call.partial + (first + split) * padded + column;
      parts[i] = split < call.splits && column < padded ? *reinterpret_cast<const uint4*>(at) : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const float times = __shfl_sync(kWarp, factor, i * kDecodeWarps + warp);
      const uint32_t words[] = {parts[i].x, parts[i].y, parts[i].z, parts[i].w};
#pragma unroll
      for (int j = 0; j < 4; j++) of_column[j] = __fmaf_rn(times, __uint_as_float(words[j]), of_column[j]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (column < padded) sums[warp][column + i] = of_column[i];
  }
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < call.v_columns; c += kDecodeThreads) {
    float value = 0;
#pragma unroll
    for (int w = 0; w < kDecodeWarps; w++) value += sums[w][c];
    store_from_float(call.out.data, call.out_dtype, b * call.out.batch + h * call.out.head + l * call.out.row + c,
               value * by);
  }
  if (threadIdx.x == 0) all.store_lse(call, row, sum);
}

}  // namespace lowbit::cuda
