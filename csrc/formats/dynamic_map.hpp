// SPDX-License-Identifier: Apache-2.0
// The dynamic maps of 8-bit optimizers (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861), in closed form.
//
// A map has `decades` decades [T / 10, T], T = 10^-(decades - 1) .. 1. Decade d (0 is the smallest) is cut in bins of equal width, 2^d of them in a
// signed map and 2^(d+1) in an unsigned one; a code means the middle of its bin. 0 and 1 are codes of their own, and a signed map has the
// negative bins too. Sorted by value: the signed code of 0 is 2^decades - 1, the unsigned one 0; the largest code means 1.
//
// So the number p of a positive code (signed: code - zero; unsigned: code + 1) is first + bin, where the first of a decade is a power of two: the
// exponent of float(p) is the decade, and within a decade value and p are linear in each other. Nothing is searched or gathered: what
// depends on the decade are tables of 8 entries, a permutation of one register. Decoded values are those of the map to 6 roundings of float32
// (bitsandbytes' table is computed in float32 and off by 3); codes are the nearest to 3 roundings of the middle between two values.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"

namespace lowbit {

namespace dynamic {

constexpr int kGuess = 151, kLowestGuess = 30;
constexpr float kSmallestGuess = 1e-7f;

struct Tables {
  alignas(64) float slope[8] = {}, offset[8] = {};   // decode, by the exponent of float(p) modulo 8
  alignas(64) float threshold[8] = {};               // encode, by guess modulo 8
  alignas(64) float inverse[8] = {}, start[8] = {};  // by guess + (reached ? 1 : 0) modulo 8
  alignas(64) int32_t last[8] = {};
};

// Encoder row r serves decade r - (7 - decades), the lowest also what is below it; row 7 is the code of 1. Rows that a short map has no decade for
// are copies of its lowest, with a threshold that everything reaches.
constexpr Tables make_tables(bool is_signed, int decades) {
  Tables tables;
  double below = 0;  // the value before the first of the decade
  for (int d = 0; d < decades; d++) {
    double top = 1;
    for (int i = d; i < decades - 1; i++) top /= 10;
    const int bins = is_signed ? 1 << d : 2 << d, first = bins, exponent = (d + (is_signed ? 127 : 128)) % 8;
    const double width = 0.9 * top / bins, value = top / 10 + width / 2;
    const bool through_zero = is_signed && d == 0;  // p = 0 shares this entry
    const float slope = static_cast<float>(through_zero ? value : width);
    tables.slope[exponent] = slope;  // the offset makes up for what rounding the slope does to the first value, the smallest
    tables.offset[exponent] = static_cast<float>(through_zero ? 0 : value - static_cast<double>(slope) * first);
    // Linear through two thresholds: the first two of the lowest decade, where what is below the first is 0, else those of equal bins.
    const double threshold = (below + value) / 2, next = value + width / 2, from = d == 0 ? threshold : value - width / 2;
    const int row = d + 7 - decades;
    for (int r = d == 0 ? 0 : row; r <= row; r++) {
      const int at = (r + kLowestGuess + 1) % 8;
      tables.threshold[(r + kLowestGuess) % 8] = d == 0 ? 0.0f : static_cast<float>(threshold);
      tables.inverse[at] = static_cast<float>(1 / (next - from));
      tables.start[at] = static_cast<float>(-0.5 - from / (next - from));
      tables.last[at] = bins - 1;
    }
    below = value + (bins - 1) * width;
  }
  const int top = (7 + kLowestGuess + 1) % 8, one = is_signed ? 1 << decades : 2 << decades;  // p of the code of 1
  tables.threshold[(7 + kLowestGuess) % 8] = static_cast<float>((below + 1) / 2);
  tables.start[top] = static_cast<float>(is_signed ? 0 : one / 2 - 1);
  tables.last[top] = is_signed ? one - 1 : one / 2;
  const int exponent = (decades + (is_signed ? 127 : 128)) % 8;  // signed: p = one gives 1; unsigned: p = 1 gives 0 and p = one gives 1
  tables.slope[exponent] = static_cast<float>(is_signed ? 1.0 / one : 1.0 / (one - 1));
  tables.offset[exponent] = is_signed ? 0.0f : -tables.slope[exponent];
  return tables;
}

constexpr int guess_of(float y) { return static_cast<int>((__builtin_bit_cast(uint32_t, y) >> 16) * kGuess >> 16); }

constexpr bool guesses_are_close(const Tables& tables) {  // all over row r the guess is r or r + 1
  for (int r = 1; r < 8; r++) {
    const float threshold = tables.threshold[(r + kLowestGuess) % 8];
    if (threshold > 0 && guess_of(threshold) != r + kLowestGuess) return false;
  }
  return guess_of(kSmallestGuess) == kLowestGuess && guess_of(1.0f) == 7 + kLowestGuess;
}

}  // namespace dynamic

namespace {  // one copy per object: these are compiled for several instruction sets, and nothing weak may be shared between them
template <bool kSigned, int kDecades>
constexpr dynamic::Tables kDynamicTables = dynamic::make_tables(kSigned, kDecades);
}

template <bool kSigned, int kDecades>
struct DynamicMap {
  static constexpr int kZero = kSigned ? (1 << kDecades) - 1 : 0;  // the code of 0

  static_assert(kSigned ? kDecades < 8 : kDecades == 7, "a table has 8 entries");
  static_assert(dynamic::guesses_are_close(kDynamicTables<kSigned, kDecades>));

  template <class Int>
  LOWBIT_INLINE static auto decode(Int code) {
    const auto p = to_float(add(code, like(code, kSigned ? -kZero : 1)));
    if constexpr (kSigned) {  // p = 0 shares the entry of p = 1, whose line goes through zero
      const auto a = abs(p);
      const Int decade = shift_right<23>(bits_of(max(a, like(a, 1.0f))));
      const auto value = fma(a, lookup8(kDynamicTables<kSigned, kDecades>.slope, decade), lookup8(kDynamicTables<kSigned, kDecades>.offset, decade));
      return float_of(bit_or(bits_of(value), bit_and(bits_of(p), like(code, INT32_MIN))));
    } else {  // the codes of 0 and 1 share an entry, whose line goes through both
      const Int decade = shift_right<23>(bits_of(p));
      return fma(p, lookup8(kDynamicTables<kSigned, kDecades>.slope, decade), lookup8(kDynamicTables<kSigned, kDecades>.offset, decade));
    }
  }

  // The nearest code of y in [-1, 1] (unsigned: [0, 1]). Anything for nan.
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {
    const Float a = kSigned ? abs(y) : y;
    // A float's bits are about its logarithm: times 151 / 2^16 their upper half counts up once a decade, somewhere below the threshold to the decade
    // that it names (checked below), so one comparison settles it.
    const auto guess = shift_right<16>(mul_high_u16(bits_of(max(a, like(a, dynamic::kSmallestGuess))), like(bits_of(a), dynamic::kGuess << 16)));
    const auto decade = sub(guess, at_least(a, lookup8(kDynamicTables<kSigned, kDecades>.threshold, guess)));
    const auto bin = to_int(fma(a, lookup8(kDynamicTables<kSigned, kDecades>.inverse, decade), lookup8(kDynamicTables<kSigned, kDecades>.start, decade)));
    const auto last = lookup8(kDynamicTables<kSigned, kDecades>.last, decade);  // bins of the decade - 1, which is also first - 1
    const auto number = add(min(bin, last), last);    // p - 1
    if constexpr (!kSigned) return number;
    return add(negate_where_negative(add(number, like(number, 1)), y), like(number, kZero));  // -1 for -1, which has no code: stores saturate
  }
};

}  // namespace lowbit
