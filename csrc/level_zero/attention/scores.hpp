// SPDX-License-Identifier: Apache-2.0
// One score, from the product of query and key to the softmax: score_mod and mask_mod, which the driver links to the
// module (score/spirv.hpp), a mask, causality.
#pragma once

#include "level_zero/attention/running.hpp"

namespace lowbit::level_zero {

extern "C" __device__ float score_mod(float score, int b, int h, int q, int k, const Global<uint64_t>* captured);
extern "C" __device__ float score_mod_gradient(float score, float gradient, int b, int h, int q, int k,
                                               const Global<uint64_t>* captured);
extern "C" __device__ float mask_mod(float score, int b, int h, int q, int k, const Global<uint64_t>* captured);

LOWBIT_INLINE void refuse(const AttentionCall& call) {
  global<int32_t>(call.fault)[1] = kBlockListFault, global<int32_t>(call.fault)[0] = 1;
}

// Runs in one thread, before anything can fault. Arguments of a launch are in registers and have no addresses.
LOWBIT_INLINE void write_table(const TableCall& call) {
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < 4; i++) global<int32_t>(call.fault)[i] = 0;
#pragma unroll
  for (int i = 0; i < TableCall::kMax; i++) global<uint64_t>(call.table)[i] = call.words[i];
}

template <class Call>
LOWBIT_INLINE float bias_of(const Call& call, int b, int h, int q, int k) {
  const int64_t at = b * call.bias_stride[0] + h * call.bias_stride[1] + q * call.bias_stride[2] +
                     k * call.bias_stride[3];
  if (call.bias_dtype == DType::boolean) return global<uint8_t>(call.bias)[at] ? 0.0f : gpu::minus_infinity();
  return load_real(call.bias, call.bias_dtype, at);
}

// Mods are called only for existing rows and columns.
template <bool kMods>
LOWBIT_INLINE float modified(const AttentionCall& call, const gpu::TilePosition& at, float product, int q, int k) {
  float s = product * call.scale;
  const int last_q = at.q0 + at.rows - 1, last_k = at.k0 + at.cols - 1;
  const int some_q = q < last_q ? q : last_q, some_k = k < last_k ? k : last_k;
  if constexpr (kMods) {
    if (call.score.words) s = score_mod(s, at.b, at.h, some_q, some_k, global<uint64_t>(call.score.words));
    if (call.mask.words && at.partial)
      s = mask_mod(s, at.b, at.h, some_q, some_k, global<uint64_t>(call.mask.words));
  }
  if (call.bias) s += bias_of(call, at.b, at.h, some_q, some_k);
  return at.cut && gpu::is_hidden(call, at, q, k) ? gpu::minus_infinity() : s;
}

// The end of a row of the forward. Returns the factor of its accumulated result; one lane writes lse and max_scores.
LOWBIT_INLINE float finish_row(const AttentionCall& call, int b, int h, int row, float top, float total, bool writes) {
  const int64_t at = (static_cast<int64_t>(b) * call.heads + h) * call.q_tiles.length + row;
  Global<float>*const largest = global<float>(call.max_scores), *const lse = global<float>(call.lse);
  const Global<float>* const sink = global<float>(call.sink);
  if (largest && writes) largest[at] = total != total && top - top == 0 ? total : top;
  RowEnd end{top, total};
  if (sink) end.add_sink(sink[h]);
  if (lse && writes) lse[at] = end.lse();
  return end.factor();
}

}  // namespace lowbit::level_zero
