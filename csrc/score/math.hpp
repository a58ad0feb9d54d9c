// SPDX-License-Identifier: Apache-2.0
// Elementary functions of one element for the score ops: plain arithmetic where a compiler turns the loop around it
// into vectors (exp), the C library elsewhere; float tanh is in cpu/score_program/strip.hpp. exp and exp2 are off by
// 1.2 units in the last place; double is the C library's.
//
// Printed programs (print.hpp) call the same names. What is arithmetic on a device too is written once, in what C++,
// CUDA C and OpenCL C have in common, and keeps its text: LOWBIT_OF_FLOATS, LOWBIT_OF_INTS. There a Float is a float,
// an Int an int. A function of the C library is a word in LOWBIT_LIBRARY1 or LOWBIT_LIBRARY2; for the rest print.cpp
// says what each language calls it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>
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
LOWBIT_INLINE float copysign_of(float a, float b) { return __builtin_copysignf(a, b); }
LOWBIT_INLINE double copysign_of(double a, double b) { return __builtin_copysign(a, b); }

// Rounded each, also where a compiler of a device would make one multiply-add of two, or a product of a division.
template <class A, class B> LOWBIT_INLINE auto add_of(A a, B b) { return a + b; }
template <class A, class B> LOWBIT_INLINE auto sub_of(A a, B b) { return a - b; }
template <class A, class B> LOWBIT_INLINE auto mul_of(A a, B b) { return a * b; }
template <class A, class B> LOWBIT_INLINE auto div_of(A a, B b) { return a / b; }

// Of one and of two arguments: the C library's name.
#define LOWBIT_LIBRARY1(F) F(expm1) F(log) F(log2) F(log1p) F(sin) F(cos) F(tan) F(atan) F(erf)
#define LOWBIT_LIBRARY2(F) F(pow) F(fmod)

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

// result name(arguments) { body }, and its text.
#define LOWBIT_OF_FLOATS(result, name, ...)                   \
  template <class Float, class Int = IntBeside<Float>>        \
  LOWBIT_INLINE result name __VA_ARGS__                       \
  inline constexpr std::string_view name##_text = #result " " #name #__VA_ARGS__
#define LOWBIT_OF_INTS(name, ...)    \
  template <class Int>               \
  LOWBIT_INLINE Int name __VA_ARGS__ \
  inline constexpr std::string_view name##_text = "Int " #name #__VA_ARGS__

LOWBIT_OF_FLOATS(Float, remainder_of, (Float a, Float b) {
  const Float r = fmod_of(a, b);
  return r != 0 && (r < 0) != (b < 0) ? r + b : r;
});
// The quotient that remainder_of belongs to. b may be infinite: not (a - r - b) / b.
LOWBIT_OF_FLOATS(Float, floor_divide_of, (Float a, Float b) {
  if (b == 0) return div_of(a, b);
  const Float r = fmod_of(a, b);
  const Float quotient = div_of(a - r, b) - (Float)(r != 0 && (r < 0) != (b < 0));
  const Float low = floor_of(quotient);
  return quotient == 0 ? copysign_of((Float)0, div_of(a, b)) : quotient - low > 0.5f ? low + 1 : low;
});
// Toward zero. What an int does not hold, nan too, becomes its least value, as the instruction of x86 does and
// therefore torch.
LOWBIT_OF_FLOATS(Int, int_of, (Float a) {
  const Int least = -2147483647 - 1;
  const bool above = a > (Float)least - (sizeof(Float) == 4 ? 0 : 1);
  return above && a < -(Float)least ? (Int)a : least;
});

// Division by zero gives 0 here; the machine reports it where the divisor is not constant.
LOWBIT_OF_INTS(floor_divide_int, (Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return wrapped(-bits_of(a));
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
});
LOWBIT_OF_INTS(trunc_divide_int, (Int a, Int b) { return b == 0 ? 0 : b == -1 ? wrapped(-bits_of(a)) : a / b; });
// Vectors have the division of doubles: the quotient of two int32 is never rounded up to an integer it has not reached.
LOWBIT_INLINE int32_t floor_divide_int(int32_t a, int32_t b) {
  const double quotient = floor_of(static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b));
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}
LOWBIT_INLINE int32_t trunc_divide_int(int32_t a, int32_t b) {
  const double quotient = static_cast<double>(a) / static_cast<double>(b == 0 ? 1 : b);
  return b == 0 ? 0 : static_cast<int32_t>(static_cast<int64_t>(quotient));
}
LOWBIT_OF_INTS(remainder_int, (Int a, Int b) {
  return wrapped(bits_of(a) - bits_of(b) * bits_of(floor_divide_int(a, b)));
});

// A shift by less than 0 or by all bits and more gives what shifting bit by bit would.
LOWBIT_OF_INTS(shifted_left, (Int a, Int b) { return b < 0 || b >= 32 ? 0 : wrapped(bits_of(a) << b); });
LOWBIT_OF_INTS(shifted_right, (Int a, Int b) { return a >> (b < 0 || b >= 32 ? 31 : b); });

template <class Int>
LOWBIT_INLINE FloatBeside<Int> float_of(Int a) { return static_cast<FloatBeside<Int>>(a); }

LOWBIT_INLINE float rounded_to_bfloat16(float a) { return float_from_bfloat16(bfloat16_from_float(a)); }
LOWBIT_INLINE float rounded_to_float16(float a) { return float_from_float16(float16_from_float(a)); }
LOWBIT_INLINE double rounded_to_bfloat16(double a) {
  return static_cast<double>(rounded_to_bfloat16(static_cast<float>(a)));
}
LOWBIT_INLINE double rounded_to_float16(double a) {
  return static_cast<double>(rounded_to_float16(static_cast<float>(a)));
}

#undef LOWBIT_OF_FLOATS
#undef LOWBIT_OF_INTS

}  // namespace lowbit
