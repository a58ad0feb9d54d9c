// SPDX-License-Identifier: Apache-2.0
// Elementary functions of one element for the score ops. exp, floor and the C library's differ between host and Intel
// GPU; arithmetic common to both is here.
//
// Printed programs (print.hpp) call the same names. Arithmetic that devices need too is written once, in the common
// subset of C++, CUDA C and OpenCL C, and its text is kept: LOWBIT_OF_FLOATS, LOWBIT_OF_INTS. There a Float is a float,
// an Int an int. A function of the C library is an entry of LOWBIT_LIBRARY1 or LOWBIT_LIBRARY2; print.cpp has the names
// of the others in each language.
#pragma once

#include <cstdint>
#include <string_view>
#include <type_traits>

#include "core/dtype.hpp"

// Of one and of two arguments: the C library's name.
#define LOWBIT_LIBRARY1(F) F(expm1) F(log) F(log2) F(log1p) F(sin) F(cos) F(tan) F(atan) F(erf)
#define LOWBIT_LIBRARY2(F) F(pow) F(fmod)

#ifdef LOWBIT_LANES  // compiled for an Intel GPU
#include "score/functions_opencl.hpp"
#else
#include "score/functions_host.hpp"
#endif

namespace lowbit {

template <class Int> using FloatBeside = std::conditional_t<sizeof(Int) == 4, float, double>;
template <class Float> using IntBeside = std::conditional_t<sizeof(Float) == 4, int32_t, int64_t>;

LOWBIT_INLINE uint32_t bits_of(int32_t a) { return static_cast<uint32_t>(a); }
LOWBIT_INLINE uint64_t bits_of(int64_t a) { return static_cast<uint64_t>(a); }
LOWBIT_INLINE int32_t wrapped(uint32_t a) { return static_cast<int32_t>(a); }
LOWBIT_INLINE int64_t wrapped(uint64_t a) {
  return static_cast<int32_t>(static_cast<uint32_t>(a));
}  // an int has 32 bits beside a double too

// Each rounded, even if a device's compiler would fuse them into a multiply-add, or replace a division by a product.
template <class A, class B> LOWBIT_INLINE auto add_of(A a, B b) { return a + b; }
template <class A, class B> LOWBIT_INLINE auto sub_of(A a, B b) { return a - b; }
template <class A, class B> LOWBIT_INLINE auto mul_of(A a, B b) { return a * b; }
template <class A, class B> LOWBIT_INLINE auto div_of(A a, B b) { return a / b; }

// Defines result name(arguments) { body }, and its text.
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
// Toward zero. A value out of int's range, nan too, becomes its least value, as with the x86 instruction
// and therefore torch.
LOWBIT_OF_FLOATS(Int, int_of, (Float a) {
  const Int least = -2147483647 - 1;
  const bool above = a > (Float)least - (sizeof(Float) == 4 ? 0 : 1);
  return above && a < -(Float)least ? (Int)a : least;
});

// Division by zero gives 0 here; the machine reports it if the divisor is not constant.
LOWBIT_OF_INTS(floor_divide_int, (Int a, Int b) {
  if (b == 0) return 0;
  if (b == -1) return wrapped(-bits_of(a));
  return a / b - (a % b != 0 && (a % b < 0) != (b < 0));
});
LOWBIT_OF_INTS(trunc_divide_int, (Int a, Int b) { return b == 0 ? 0 : b == -1 ? wrapped(-bits_of(a)) : a / b; });
LOWBIT_OF_INTS(remainder_int, (Int a, Int b) {
  return wrapped(bits_of(a) - bits_of(b) * bits_of(floor_divide_int(a, b)));
});

// A shift by a negative count, or by all bits or more, gives the result of shifting bit by bit.
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
