// SPDX-License-Identifier: Apache-2.0
// Conversion of rows of keys and values to codes and back, one warp per row, with the bits of the CPU's rows.
#pragma once

#include "cuda/decode/rotate.cuh"
#include "gpu/device/reduce.cuh"

namespace lowbit::cuda {

struct RowPlace {
  int64_t b, h, l;
  bool is_there;
  LOWBIT_INLINE explicit RowPlace(const KvConvertCall& call) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * kDecodeWarps + warp_of_cta(), row = call.first + i;
    is_there = i < call.rows, l = row % call.length, h = row / call.length % call.heads,
    b = row / call.length / call.heads;
  }
  LOWBIT_INLINE int64_t in(const HeadRows& rows) const { return b * rows.batch + h * rows.head + l * rows.row; }
};

struct LargestFloat {
  LOWBIT_INLINE float operator()(float a, float b) const { return a > b ? a : b; }
};
struct SumOfFloats {
  LOWBIT_INLINE float operator()(float a, float b) const { return a + b; }
};

// The element of largest magnitude, with its sign; nan if any element is nan or inf.
template <int kCount>
LOWBIT_INLINE float extreme(const float* x) {
  float high = 0, low = 0, poison = 0;
#pragma unroll
  for (int i = 0; i < kCount; i++)
    high = LargestFloat()(x[i], high), low = LargestFloat()(-x[i], low), poison = __fmaf_rn(x[i], 0.0f, poison);
  high = of_warp(LargestFloat(), high), low = of_warp(LargestFloat(), low), poison = of_warp(SumOfFloats(), poison);
  return (high >= low ? high : -low) + poison;
}

// Stores the scale, rounded to its dtype, and returns the rounded value.
LOWBIT_INLINE float store_scale(const KvConvertCall& call, int64_t at, float value) {
  if (lane_of_warp() == 0) store_from_float(call.scale.data, call.scale_dtype, at, value);
  return call.scale_dtype == DType::float32 ? value : float_from_float16(float16_from_float(value));
}

LOWBIT_INLINE int code_of(float x, float scale, float low, float high) {
  const float inverse = scale != 0.0f && scale == scale ? __fdiv_rn(1.0f, scale) : 0.0f;
  return to_int(min(max(f32{x * inverse}, f32{low}), f32{high})).lane;
}

template <KvFormat kFormat, int kGroups>
LOWBIT_INLINE void kv_quantize(const KvConvertCall& call) {
  const RowPlace at(call);
  if (!at.is_there) return;
  const int lane = lane_of_warp();
  float x[kGroups];
  load_row(x, call.x.data, call.x_dtype, at.in(call.x), call.columns);
  if (call.rotated) rotate(x);
  auto* codes = static_cast<uint8_t*>(call.codes.data) + at.in(call.codes);
  if constexpr (kFormat == KvFormat::int8) {
    const float top = extreme<kGroups>(x);
    const float scale = store_scale(call, at.in(call.scale), __fdiv_rn(top < 0 ? -top : top, 127.0f));
#pragma unroll
    for (int g = 0; g < kGroups; g++)
      codes[g * 32 + lane] = static_cast<uint8_t>(code_of(x[g], scale, -127.0f, 127.0f));
  } else {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {  // the extreme becomes -8, the level without an opposite
      const float scale = store_scale(call, at.in(call.scale) + g, __fdiv_rn(extreme<1>(x + g), -8.0f));
      const int code = code_of(x[g], scale, -8.0f, 7.0f) + 8, upper = __shfl_xor_sync(kWarp, code, 16);
      if (lane < 16) codes[g * 16 + lane] = static_cast<uint8_t>(code | upper << 4);
    }
  }
}

template <KvFormat kFormat, int kGroups>
LOWBIT_INLINE void kv_dequantize(const KvConvertCall& call) {
  const RowPlace at(call);
  if (!at.is_there) return;
  const int lane = lane_of_warp();
  const auto* codes = static_cast<const uint8_t*>(call.codes.data) + at.in(call.codes);
  float x[kGroups];
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    constexpr bool kInt8 = kFormat == KvFormat::int8;
    const float scale = load_as_float(call.scale.data, call.scale_dtype, at.in(call.scale) + (kInt8 ? 0 : g));
    const int code = kInt8 ? static_cast<int8_t>(codes[g * 32 + lane])
                           : (codes[g * 16 + lane % 16] >> (lane < 16 ? 0 : 4) & 15) - 8;
    x[g] = static_cast<float>(code) * scale;
  }
  if (call.rotated) rotate(x);
#pragma unroll
  for (int g = 0; g < kGroups; g++)
    if (g * 32 + lane < call.columns) store_from_float(call.x.data, call.x_dtype, at.in(call.x) + g * 32 + lane, x[g]);
}

}  // namespace lowbit::cuda
