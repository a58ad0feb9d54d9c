// SPDX-License-Identifier: Apache-2.0
// One score, from the product of query and key to the softmax: score_mod, mask_mod, a mask, causality. The kernels are
// made for Mods (mods.cuh), which says three things more:
//   kFolds    scores are products times a scale > 0, which goes into the exponent: no mod, no mask
//   kDropout
//   kBias     dtype of the call's mask
#pragma once

#include "cuda/attention/mods.cuh"
#include "cuda/attention/tile.cuh"
#include "gpu/attention/place.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE void refuse(const AttentionCall&) { fail(); }

template <DType dtype>
LOWBIT_INLINE float bias_of(const AttentionCall& call, int b, int h, int q, int k) {
  const int64_t at = b * call.bias_stride[0] + h * call.bias_stride[1] + q * call.bias_stride[2] +
                     k * call.bias_stride[3];
  if constexpr (dtype == DType::boolean) return static_cast<const uint8_t*>(call.bias)[at] ? 0.0f : minus_infinity();
  else if constexpr (dtype == DType::float32) return static_cast<const float*>(call.bias)[at];
  else if constexpr (dtype == DType::float64) return static_cast<float>(static_cast<const double*>(call.bias)[at]);
  else if constexpr (dtype == DType::bfloat16) return float_from_bfloat16(static_cast<const uint16_t*>(call.bias)[at]);
  else return float_of_half(static_cast<const uint16_t*>(call.bias)[at]);
}

// The factor of dropout for a probability.
LOWBIT_INLINE float dropout_factor(const AttentionCall& call, const TilePlace& at, int q, int k) {
  return dropout_draw(*call.seed, at.b * call.heads + at.h, q, k) < call.dropped ? 0.0f : call.kept;
}

// The score of the softmax; where Mods folds, without the scale. Mods are called only for rows and columns that exist.
template <class Mods>
LOWBIT_INLINE float modified(const AttentionCall& call, const TilePlace& at, float product, int q, int k) {
  float s = product;
  if constexpr (!Mods::kFolds) {
    s *= call.scale;
    const int last_q = at.q0 + at.rows - 1, last_k = at.k0 + at.cols - 1;
    const int some_q = q < last_q ? q : last_q, some_k = k < last_k ? k : last_k;
    if constexpr (Mods::kScore) s = Mods::score(call, s, at.b, at.h, some_q, some_k);
    if constexpr (Mods::kMask)
      if (at.partial) s = Mods::mask(call, s, at.b, at.h, some_q, some_k);
    if constexpr (Mods::kBias != DType::other) s += bias_of<Mods::kBias>(call, at.b, at.h, some_q, some_k);
  }
  return at.cut && is_hidden(call, at, q, k) ? minus_infinity() : s;
}

// The factor of a difference of scores in the exponent of 2. Differences, since large scores times log2(e) would be off
// by more than 1.
template <class Mods>
LOWBIT_INLINE float exponent_factor(const AttentionCall& call) { return Mods::kFolds ? call.scale * kLog2e : kLog2e; }

}  // namespace lowbit::cuda
