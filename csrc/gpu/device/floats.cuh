// SPDX-License-Identifier: Apache-2.0
// Elements of tensors whose dtype, one of the three floats, is known only when a kernel runs.
#pragma once

#include "core/dtype.hpp"

namespace lowbit::gpu {

LOWBIT_INLINE float load_as_float(const void* from, DType dtype, int64_t at) {
  if (dtype == DType::float32) return static_cast<const float*>(from)[at];
  const uint16_t bits = static_cast<const uint16_t*>(from)[at];
  return dtype == DType::bfloat16 ? float_from_bfloat16(bits) : float_of_half(bits);
}

LOWBIT_INLINE void store_from_float(void* to, DType dtype, int64_t at, float value) {
  if (dtype == DType::float32) static_cast<float*>(to)[at] = value;
  else static_cast<uint16_t*>(to)[at] =
      dtype == DType::bfloat16 ? bfloat16_from_float(value) : float16_from_float(value);
}

#ifdef LOWBIT_LANES  // an Intel GPU, which has no instruction for it
LOWBIT_INLINE uint32_t pair_of_bf16(float low, float high) {
  return bfloat16_from_float(low) | static_cast<uint32_t>(bfloat16_from_float(high)) << 16;
}
LOWBIT_INLINE uint32_t pair_of_f16(float low, float high) {
  return float16_from_float(low) | static_cast<uint32_t>(float16_from_float(high)) << 16;
}
#endif

// Two floats packed in a 16-bit dtype.
LOWBIT_INLINE uint32_t pair_of(DType dtype, float low, float high) {
  return dtype == DType::bfloat16 ? pair_of_bf16(low, high) : pair_of_f16(low, high);
}

}  // namespace lowbit::gpu
