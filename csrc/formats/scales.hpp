// SPDX-License-Identifier: Apache-2.0
// Computes scales, zero points and codes of a weight from its floats: the same text, and so the same bits, on
// CPUs and devices.
#pragma once

#include "formats/list.hpp"

namespace lowbit {

// How a scale is chosen. symmetric: amax over half the range, as in torchao (the largest weight clips by half a step);
// symmetric_no_clipping_err: no weight clips; asymmetric: min..max widened to contain 0, with an integer zero point.
enum class Mapping : int { symmetric, symmetric_no_clipping_err, asymmetric };

namespace {

// 2^floor(log2(x)), exact; 0 for 0 and subnormals.
LOWBIT_INLINE float power_of_two_below(float x) { return float_from_bits(bits_of_float(x) & 0x7f800000u); }

// The scale of weights from low <= 0 to high >= 0, before rounding for storage; 0 instead of subnormals.
template <class Codec>
LOWBIT_INLINE float scale_of_range(float low, float high, Mapping mapping, float code_max) {
  const float absmax = -low > high ? -low : high, half = (code_max + 1) / 2;
  float scale = absmax / (code_max / 2);
  if constexpr (Codec::kind == CodecKind::lookup) {
    scale = absmax / Codec::range;
  } else if (mapping == Mapping::symmetric_no_clipping_err) {
    scale = -low / half > high / (half - 1) ? -low / half : high / (half - 1);
  } else if (mapping == Mapping::asymmetric) {  // a range may exceed float32
    scale = high - low < __builtin_inff() ? (high - low) / code_max : high / code_max - low / code_max;
  }
  return scale >= 0x1p-126f ? scale : 0.0f;
}

// The integer nearest to x, which is not negative and below 2^22: adding 1.5 * 2^23 removes the fraction. -0 stays -0.
LOWBIT_INLINE float nearest_integer(float x) {
  return float_from_bits(bits_of_float((x + 0x1.8p23f) - 0x1.8p23f) | (bits_of_float(x) & 0x80000000u));
}

// The zero point of an asymmetric weight with minimum `low`, given the stored scale.
LOWBIT_INLINE float zero_of_range(float low, float scale, float code_max) {
  const float zero = scale > 0.0f ? nearest_integer(-low / scale) : 0.0f;
  return zero > code_max ? code_max : zero;
}

// Codes of weights, given weight / scale + zero point.
template <class Codec, class Float>
LOWBIT_INLINE auto nearest_code(Float v, float code_max) {
  if constexpr (Codec::kind == CodecKind::lookup) return Codec::nearest(v);
  else return to_int(max(like(v, 0.0f), min(like(v, code_max), v)));
}

}  // namespace
}  // namespace lowbit
