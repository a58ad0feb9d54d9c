// SPDX-License-Identifier: Apache-2.0
// Elementary functions of one element for the score ops: plain arithmetic where a compiler turns the loop around it
// into vectors (exp), the C library elsewhere; float tanh is in cpu/score_program/strip.hpp. exp and exp2 are off by
// 1.2 units in the last place; double is the C library's.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "core/dtype.hpp"

namespace lowbit {

template <class Int> using FloatBeside = std::conditional_t<sizeof(Int) == 4, float, double>;
template <class Float> using IntBeside = std::conditional_t<sizeof(Float) == 4, int32_t, int64_t>;

LOWBIT_INLINE uint32_t bits_of(int32_t a) { return static_cast<uint32_t>(a); }
LOWBIT_INLINE uint64_t bits_of(int64_t a) { return static_cast<uint64_t>(a); }
LOWBIT_INLINE int32_t wrapped(uint32_t a) { return static_cast<int32_t>(a); }
LOWBIT_INLINE int64_t wrapped(uint64_t a) {
  return static_cast<int32_t>(static_cast<uint32_t>(a));
}  // an int has 32 bits beside a double too

LOWBIT_INLINE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LOWBIT_INLINE double fma_of(double a, double b, double c) { return __builtin_fma(a, b, c); }
LOWBIT_INLINE float sqrt_of(float a) { return __builtin_sqrtf(a); }
LOWBIT_INLINE double sqrt_of(double a) { return __builtin_sqrt(a); }
LOWBIT_INLINE float floor_of(float a) { return __builtin_floorf(a); }
LOWBIT_INLINE double floor_of(double a) { return __builtin_floor(a); }
LOWBIT_INLINE float round_of(float a) { return __builtin_nearbyintf(a); }
LOWBIT_INLINE double round_of(double a) { return __builtin_nearbyint(a); }

#define LOWBIT_LIBRARY1(name)                                                        \
  LOWBIT_INLINE float name##_of(float a) { return __builtin_##name##f(a); }          \
  LOWBIT_INLINE double name##_of(double a) { return __builtin_##name(a); }
#define LOWBIT_LIBRARY2(name)                                                                \
  LOWBIT_INLINE float name##_of(float a, float b) { return __builtin_##name##f(a, b); }      \
  LOWBIT_INLINE double name##_of(double a, double b) { return __builtin_##name(a, b); }
LOWBIT_LIBRARY1(expm1)
LOWBIT_LIBRARY1(log) LOWBIT_LIBRARY1(log2) LOWBIT_LIBRARY1(log1p) LOWBIT_LIBRARY1(sin) LOWBIT_LIBRARY1(cos)
    LOWBIT_LIBRARY1(tan) LOWBIT_LIBRARY1(atan) LOWBIT_LIBRARY1(erf) LOWBIT_LIBRARY2(pow) LOWBIT_LIBRARY2(fmod)
#undef LOWBIT_LIBRARY1
#undef LOWBIT_LIBRARY2
        LOWBIT_INLINE double exp_of(double a) { return __builtin_exp(a); }
LOWBIT_INLINE double exp2_of(double a) { return __builtin_exp2(a); }
LOWBIT_INLINE double tanh_of(double a) { return __builtin_tanh(a); }

// p * 2^n in two steps, so that subnormal results and overflow to infinity come out right for n in -150..129.
LOWBIT_INLINE float times_power_of_two(float p, int32_t n) {
  const int32_t half = n >> 1;
  return p * std::bit_cast<float>((half + 127) << 23) * std::bit_cast<float>((n - half + 127) << 23);
}

// e^r for |r| <= ln2 / 2, fitted with relative error 3e-9
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
  x = x < -104.0f ? -104.0f : x;  // e^-104 rounds to 0, e^89 to infinity; nan passes
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

template <class Float>
LOWBIT_INLINE std::enable_if_t<std::is_floating_point_v<Float>, Float> remainder_of(Float a, Float b) {
  const Float r = fmod_of(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
template <class Float>
LOWBIT_INLINE std::enable_if_t<std::is_floating_point_v<Float>, Float> floor_divide_of(
    Float a, Float b) {  // the quotient that remainder_of belongs to
  if (b == 0) return a / b;
  const Float r = fmod_of(a, b), truncated = (a - r) / b;
  const Float quotient = truncated - Float(r != 0 && (r < 0) != (b < 0)),
              low = floor_of(quotient);  // b may be infinite: not (a - r - b) / b
  return quotient == 0 ? __builtin_copysign(Float(0), a / b) : quotient - low > Float(0.5) ? low + 1 : low;
}

// Integers are divided as doubles, which vectors have: the quotient of two int32 is never rounded up to an integer it
// has not reached. Division by zero gives 0 here; the machine reports it where the divisor is not constant.
LOWBIT_INLINE int32_t floor_divide_of(int32_t a, int32_t b) {
  const double quotient = floor_of(static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b));
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}
LOWBIT_INLINE int64_t floor_divide_of(int64_t a, int64_t b) {
  if (b == 0) return 0;
  if (b == -1) return wrapped(-bits_of(a));
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
}
LOWBIT_INLINE int32_t trunc_divide_of(int32_t a, int32_t b) {
  const double quotient = static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b);
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}
LOWBIT_INLINE int64_t trunc_divide_of(int64_t a, int64_t b) {
  return b == 0 ? 0 : b == -1 ? wrapped(-bits_of(a)) : a / b;
}
template <class Int>
LOWBIT_INLINE std::enable_if_t<std::is_integral_v<Int>, Int> remainder_of(Int a, Int b) {
  return wrapped(bits_of(a) - bits_of(b) * bits_of(floor_divide_of(a, b)));
}

// Toward zero. What int32 does not hold, nan too, becomes its least value, as the instruction of x86 does and therefore
// torch.
template <class Float>
LOWBIT_INLINE IntBeside<Float> int_of(Float a) {
  const bool fits = a > Float(-2147483648.0) - (sizeof(Float) == 4 ? 0 : 1) && a < Float(2147483648.0);
  return fits ? static_cast<IntBeside<Float>>(a) : INT32_MIN;
}

// A shift by less than 0 or by all bits and more gives what shifting bit by bit would.
template <class Int>
LOWBIT_INLINE Int shifted_left(Int a, Int b) {
  constexpr Int kBits = 32;
  return b < 0 || b >= kBits ? 0 : wrapped(bits_of(a) << b);
}
template <class Int>
LOWBIT_INLINE Int shifted_right(Int a, Int b) {
  constexpr Int kBits = 32;
  return a >> (b < 0 || b >= kBits ? kBits - 1 : b);
}

LOWBIT_INLINE float rounded_to_bfloat16(float a) { return float_from_bfloat16(bfloat16_from_float(a)); }
LOWBIT_INLINE float rounded_to_float16(float a) { return float_from_float16(float16_from_float(a)); }
LOWBIT_INLINE double rounded_to_bfloat16(double a) {
  return static_cast<double>(rounded_to_bfloat16(static_cast<float>(a)));
}
LOWBIT_INLINE double rounded_to_float16(double a) {
  return static_cast<double>(rounded_to_float16(static_cast<float>(a)));
}

}  // namespace lowbit
