// SPDX-License-Identifier: Apache-2.0
// Scales and zero points of one row of a weight, from the ranges of its groups, in full precision and as stored. The
// row is float32 [padded_k], padded with zeros. Include after a header of cpu/simd/.
#pragma once

#include "core/dtype.hpp"
#include "formats/format.hpp"
#include "formats/scales.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int64_t length_of_group(const WeightSpec& spec, int64_t g) {
  return smaller(spec.group_k(), spec.padded_k() - g * spec.group_k());
}

// 0, or nan if any x is nan or inf.
LOWBIT_INLINE float poison_of(const float* x, int64_t count) {
  f32x16 poison = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) poison = fma(load(x + i), set1(0.0f), poison);
  return sum(poison);
}

// The scale of x[0..count), before rounding for storage.
template <class Codec>
LOWBIT_INLINE float choose_scale(const float* x, int64_t count, Mapping mapping, float code_max) {
  f32x16 low = set1(0.0f), high = set1(0.0f);  // a range contains 0, and padding is 0
  for (int64_t i = 0; i < count; i += 16) low = min(low, load(x + i)), high = max(high, load(x + i));
  return scale_of_range<Codec>(-largest(sub(set1(0.0f), low)), largest(high), mapping, code_max);
}

LOWBIT_INLINE float choose_zero(const float* x, int64_t count, float scale, float code_max) {
  float low = 0.0f;
  for (int64_t i = 0; i < count; i++) low = x[i] < low ? x[i] : low;
  return zero_of_range(low, scale, code_max);
}

template <class Codec>
LOWBIT_INLINE void choose_scales(const WeightSpec& spec, const float* x, Mapping mapping, float* scale) {
  const float levels = static_cast<float>(code_max(spec.format));
  for (int64_t g = 0; g < spec.groups(); g++)
    scale[g] = choose_scale<Codec>(x + g * spec.group_k(), length_of_group(spec, g), mapping, levels);
}

// Chooses zero points for the rounded scales.
LOWBIT_INLINE void choose_zeros(const WeightSpec& spec, const float* x, const float* scale, float* zero) {
  const float levels = static_cast<float>(code_max(spec.format));
  for (int64_t g = 0; g < spec.groups(); g++)
    zero[g] = spec.asymmetric ? choose_zero(x + g * spec.group_k(), length_of_group(spec, g), scale[g], levels)
                              : static_cast<float>(symmetric_zero(spec.format));
}

// Splits scales into a factor of the row, which is returned, and a float16 per group, passed to half(g, float16), and
// rounds the scales to these. A power of two as the row's factor keeps every float16 scale of an imported checkpoint
// exact, and gives weights of any magnitude the full precision of float16.
template <class Half>
LOWBIT_INLINE float round_scales(const WeightSpec& spec, float* scale, Half&& half) {
  if (spec.group_size == 0) return scale[0];
  float largest_scale = 0.0f;
  for (int64_t g = 0; g < spec.groups(); g++) {  // scales from the search may be negative
    const float size = __builtin_fabsf(scale[g]);
    largest_scale = size > largest_scale ? size : largest_scale;
  }
  const float factor = power_of_two_below(largest_scale), inverse = factor > 0.0f ? 1.0f / factor : 0.0f;
  for (int64_t g = 0; g < spec.groups(); g++) {
    const uint16_t stored = float16_from_float(scale[g] * inverse);
    half(g, stored);
    scale[g] = float_from_float16(stored) * factor;
  }
  return factor;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
