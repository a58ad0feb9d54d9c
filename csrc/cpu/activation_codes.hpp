// SPDX-License-Identifier: Apache-2.0
// Rounding of a row of activations, or of one of its groups, to int8 or float8: scale and codes. Include after a header
// of cpu/simd/.
#pragma once

#include "cpu/simd/math.hpp"
#include "formats/e4m3.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// q = round(x * inverse + zero_point)
struct Range {
  float scale, inverse, zero_point;
};

// scale = amax / most; a nan or inf in the range makes the scale nan, and with it all results of the row. The bits of
// magnitudes have the order of integers, with inf and nan above the finite ones: one reduction finds both.
LOWBIT_INLINE Range symmetric_range(const float* x, int64_t k, float most) {
  constexpr int32_t kMagnitude = 0x7fffffff, kInf = 0x7f800000;
  i32x16 amax = set1(int32_t{0});
  for (int64_t i = 0; i < k; i += 16) amax = max(amax, bit_and(bits_of(load(x + i)), set1(kMagnitude)));
  const int32_t bits = largest(amax);
  const float scale = bits < kInf ? __builtin_bit_cast(float, bits) / most : __builtin_nanf("");
  return {scale, scale >= 0x1p-126f ? 1.0f / scale : 0.0f, 0.0f};
}

// x = scale * (q - zero_point) with q in -127..127 and a range that contains 0. Plain code: rarely used, for parity
// with torchao.
inline Range asymmetric_range(const float* x, int64_t k) {
  float lowest = 0.0f, highest = 0.0f, poison = 0.0f;
  for (int64_t i = 0; i < k; i++) {
    lowest = x[i] < lowest ? x[i] : lowest;
    highest = x[i] > highest ? x[i] : highest;
    poison += x[i] * 0.0f;
  }
  const float scale = (highest - lowest) / 254.0f + poison;
  if (!(scale >= 0x1p-126f)) return {scale, 0.0f, 0.0f};
  return {scale, 1.0f / scale, __builtin_nearbyintf(-127.0f - lowest / scale)};
}

LOWBIT_INLINE i32x16 int8_codes(f32x16 x, f32x16 inverse, f32x16 zero_point) {
  const f32x16 scaled = fma(x, inverse, zero_point), limit = set1(127.0f);
  return to_int(max(sub(set1(0.0f), limit), min(scaled, limit)));  // gives nan a code too; its scale is nan
}

// x as float8_e4m3fn times one scale.
LOWBIT_INLINE void round_to_float8(float* x, int64_t k) {
  const Range range = symmetric_range(x, k, E4M3::largest);
  const f32x16 inverse = set1(range.inverse), scale = set1(range.scale);
  for (int64_t i = 0; i < k; i += 16)
    store(x + i, mul(E4M3::decode(E4M3::encode(mul(load(x + i), inverse))), scale));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
