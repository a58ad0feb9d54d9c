// SPDX-License-Identifier: Apache-2.0
// score_mod and mask_mod in a kernel. Kernels are instantiated with Mods, which says whether there are any (kScore,
// kMask), and whose functions score, gradient and mask make the printed structs of a head (score_struct of
// score/print.hpp). A Call has the captured tensors, and the address for faults.
#pragma once

#include "cuda/device/tiles.cuh"
#include "gpu/attention/call.hpp"

namespace lowbit::cuda {

// A captured tensor, in the form that printed functions take.
struct Elements {
  const void* data;
  template <class T>
  LOWBIT_INLINE operator const T*() const { return static_cast<const T*>(data); }
};

// Replaces the accumulator of a gradient (d<n> of score/print.hpp) that is not wanted.
struct NoSum {
  LOWBIT_INLINE explicit operator bool() const { return false; }
  LOWBIT_INLINE NoSum operator+(int64_t) const { return *this; }
};
LOWBIT_INLINE void add_to(NoSum, float) {}

// tanh to 2^-22, usually of a capped score: a small relative error near 0 would cost three times as much.
LOWBIT_INLINE float tanh_of_score(float a) {
  return __fmaf_rn(-2.0f, reciprocal(power_of_2(a * (2 * kLog2e)) + 1), 1.0f);
}

// Called after the last mod of this CTA: fails if a gather was out of range, or an integer was divided by zero.
template <class Mods, class Call>
LOWBIT_INLINE void check_fault(const Call& call) {
  if constexpr (Mods::kScore || Mods::kMask)
    if (*static_cast<volatile int32_t*>(call.fault)) fail();
}

}  // namespace lowbit::cuda
