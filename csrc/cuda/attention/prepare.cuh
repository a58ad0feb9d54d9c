// SPDX-License-Identifier: Apache-2.0
// Kernels around the tiles of attention. Before: classes of the blocks listed by a block mask, a row of them per CTA;
// for the backward, D of every row. After: the gradient of the sink.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE void attention_prepare(const AttentionCall& call) {
  if (blockIdx.x == 0 && threadIdx.x == 0 && call.fault) *call.fault = 0;
  if (call.classes) make_classes(call, [] { __syncthreads(); });
}

// D = sum of grad_out * out - grad_lse, one warp per row; also grad_out in 16 bits if it is float32.
template <DType dtype, int kEv>
LOWBIT_INLINE void row_statistics(const AttentionCall& call) {
  const int64_t length = call.q_tiles.length,
                at = static_cast<int64_t>(blockIdx.x) * kAttentionWarps + warp_of_cta();
  if (at >= length * call.heads * call.batch) return;
  const int64_t row = at % length, h = at / length % call.heads, b = at / length / call.heads;
  const int64_t out = b * call.out.batch + h * call.out.head + row * call.out.row,
                given = b * call.given.batch + h * call.given.head + row * call.given.row;
  float sum = 0;
  for (int column = lane_of_warp() * 2; column < kEv; column += 64) {
    float grad[2];
    for (int i = 0; i < 2; i++) {
      grad[i] = load_as_float(call.given.data, call.out_dtype, given + column + i);
      sum = __fmaf_rn(load_as_float(call.out.data, call.out_dtype, out + column + i), grad[i], sum);
    }
    if (call.out_dtype == DType::float32)
      store_pair<dtype>(call.grad_out, dtype, static_cast<int>(b), static_cast<int>(h), static_cast<int>(row), column,
                        grad[0], grad[1]);
  }
#pragma unroll
  for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(kWarp, sum, step);
  if (lane_of_warp() != 0) return;
  const float lse = call.lse[at];
  call.statistics[at] = {lse == minus_infinity() ? 0.0f : lse,
                         sum - (call.grad_lse ? call.grad_lse[at] : 0.0f)};
}

// One CTA per head; the order of the sum is fixed.
LOWBIT_INLINE void sink_gradient(const AttentionCall& call) {
  LOWBIT_SHARED(double, sums, [kAttentionThreads]);
  double sum = sink_gradient_of_thread<double>(call, [](float a) { return expf(a); });
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kAttentionThreads; i++) sum += sums[i];
  call.grad_sink[blockIdx.x] = static_cast<float>(sum);
}

}  // namespace lowbit::cuda
