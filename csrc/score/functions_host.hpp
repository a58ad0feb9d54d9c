// SPDX-License-Identifier: Apache-2.0
// The functions of score/math.hpp on the host: plain arithmetic if a compiler vectorizes the loop around it (exp), the
// C library otherwise; float tanh is in cpu/score_program/strip.hpp. exp and exp2 are off by 1.2 units in the last
// place; double uses the C library.
#pragma once

#include <bit>
#include <cmath>

#include "core/bits.hpp"

namespace lowbit {

LOWBIT_INLINE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LOWBIT_INLINE double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }
LOWBIT_INLINE float sqrt_of(float a) { return __builtin_sqrtf(a); }
LOWBIT_INLINE double sqrt_of(double a) { return __builtin_sqrt(a); }
LOWBIT_INLINE float floor_of(float a) { return __builtin_floorf(a); }
LOWBIT_INLINE double floor_of(double a) { return __builtin_floor(a); }
LOWBIT_INLINE float round_of(float a) { return __builtin_nearbyintf(a); }
LOWBIT_INLINE double round_of(double a) { return __builtin_nearbyint(a); }
LOWBIT_INLINE float copysign_of(float a, float b) { return __builtin_copysignf(a, b); }
LOWBIT_INLINE double copysign_of(double a, double b) { return __builtin_copysign(a, b); }

#define LOWBIT_DEFINE1(name)                                                \
  LOWBIT_INLINE float name##_of(float a) { return __builtin_##name##f(a); } \
  LOWBIT_INLINE double name##_of(double a) { return __builtin_##name(a); }
#define LOWBIT_DEFINE2(name)                                                            \
  LOWBIT_INLINE float name##_of(float a, float b) { return __builtin_##name##f(a, b); } \
  LOWBIT_INLINE double name##_of(double a, double b) { return __builtin_##name(a, b); }
LOWBIT_LIBRARY1(LOWBIT_DEFINE1)
LOWBIT_LIBRARY2(LOWBIT_DEFINE2)
#undef LOWBIT_DEFINE1
#undef LOWBIT_DEFINE2

LOWBIT_INLINE double exp_of(double a) { return __builtin_exp(a); }
LOWBIT_INLINE double exp2_of(double a) { return __builtin_exp2(a); }
LOWBIT_INLINE double tanh_of(double a) { return __builtin_tanh(a); }

// p * 2^n in two multiplications, so that subnormals and overflow to infinity are correct for n in -150..129.
LOWBIT_INLINE float times_power_of_two(float p, int32_t n) {
  const int32_t half = n >> 1;
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}

// e^r for |r| <= ln2 / 2, fitted with a relative error of 3e-9
LOWBIT_INLINE float exp_of_small(float r) {
  float p = 1.3814608e-3f;
  p = fma_of(p, r, 8.368711e-3f);
  p = fma_of(p, r, 4.166839e-2f);
  p = fma_of(p, r, 1.6666521e-1f);
  p = fma_of(p, r, 4.9999994e-1f);
  p = fma_of(p, r, 1.0f);
  return fma_of(p, r, 1.0f);
}

LOWBIT_INLINE float exp_of(float x) {
  x = x < -104.0f ? -104.0f : x;  // e^-104 rounds to 0, e^89 to infinity; nan passes through
  x = x > 89.0f ? 89.0f : x;
  const float n = round_of(x * 1.44269504f);
  const float r = fma_of(n, 2.12194440e-4f, fma_of(n, -0.693359375f, x));
  return times_power_of_two(exp_of_small(r), static_cast<int32_t>(n));
}

LOWBIT_INLINE float exp2_of(float x) {
  x = x < -151.0f ? -151.0f : x;
  x = x > 129.0f ? 129.0f : x;
  const float n = round_of(x);
  return times_power_of_two(exp_of_small((x - n) * 0.693147181f), static_cast<int32_t>(n));
}

// Vectors can divide doubles: the quotient of two int32 is never rounded up to an integer that it has not reached.
LOWBIT_INLINE int32_t floor_divide_int(int32_t a, int32_t b) {
  const double quotient = floor_of(static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b));
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}
LOWBIT_INLINE int32_t trunc_divide_int(int32_t a, int32_t b) {
  const double quotient = static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b);
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}

}  // namespace lowbit
