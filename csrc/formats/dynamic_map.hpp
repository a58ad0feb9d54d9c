// SPDX-License-Identifier: Apache-2.0
// The dynamic maps of 8-bit optimizers (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861), in closed form.
//
// A map has `decades` decades [10^-i / 10, 10^-i], i = decades - 1 .. 0. Decade d (0 is the smallest) is cut in bins of equal width, 2^d of them in a
// signed map and 2^(d+1) in an unsigned one; a code means the middle of its bin. 0 and 1 are codes of their own, and a signed map has the
// negative bins too. Sorted by value: the signed code of 0 is 2^decades - 1, the unsigned one 0; the largest code means 1.
//
// So the number p of a positive code (signed: code - zero; unsigned: code + 1) has decade and bin as exponent and mantissa, and there is no table to
// search or gather from: an entry of 8 floats per decade is one permutation. Equal to the tables of both packages to one rounding.
#pragma once

#include "core/dtype.hpp"

namespace lowbit {

template <bool kSigned, int kDecades>
struct DynamicMap {
  static constexpr int kZero = kSigned ? (1 << kDecades) - 1 : 0;  // the code of 0

  template <class Int>
  LOWBIT_INLINE static auto decode(Int code) {
    static constexpr Tables kTables = make_tables();  // here, because Int belongs to one ISA: no symbol that two of them share
    // The middle of bin b of 2^d is the mantissa of p + 1/2, p = 2^d + b. The exponent modulo 8 chooses the decade; 0 and 1 share an entry, which is
    // made so that their mantissas give 0 and 1.
    const Int offset = add(code, like(code, kSigned ? -kZero : 1));
    const auto signed_p = to_float(offset);
    const auto t = add(abs(signed_p), like(signed_p, 0.5f));
    const Int exponent = shift_right<23>(bits_of(t));
    const auto fraction = sub(float_of(bit_or(bit_and(bits_of(t), like(code, 0x7fffff)), like(code, 0x3f800000))), like(t, 1.0f));
    const auto value = fma(fraction, lookup8(kTables.span, exponent), lookup8(kTables.low, exponent));
    return kSigned ? copysign(value, signed_p) : value;
  }

  // The nearest code of y in [-1, 1] (unsigned: [0, 1]), where the halfway points are right to one rounding of float32. Anything for nan.
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {
    static constexpr Tables kTables = make_tables();
    const Float a = abs(y);
    const auto bits = bits_of(a);
    // A float's bits are about its logarithm: this guesses the number of thresholds that a has reached, or one less, which one comparison settles.
    constexpr float kDecadesPerBit = 0.3125f / (1 << 23), kGuess = kDecades + 0.4f - 127 * 0.3125f;
    const auto guess = min(max(truncate(fma(to_float(bits), like(y, kDecadesPerBit), like(y, kGuess))), like(bits, 0)), like(bits, kDecades));
    const auto reached = sub(guess, at_least(a, lookup8(kTables.threshold, guess)));  // 0: code of 0; kDecades + 1: code of 1
    const auto bin = truncate(fma(a, lookup8(kTables.slope, reached), lookup8(kTables.offset, reached)));
    const auto power = two_to_the(reached);
    if constexpr (!kSigned) return min(add(add(power, bin), like(bits, -1)), add(add(power, power), like(bits, -2)));
    const auto negative = shift_right<31>(bits_of(y)), mask = sub(like(bits, 0), negative);
    auto p = min(add(shift_right<1>(power), bin), add(power, like(bits, -1)));
    p = min(p, sub(like(bits, 1 << kDecades), negative));  // there is no code of -1
    return add(add(bit_xor(p, mask), negative), like(bits, kZero));
  }

 private:
  struct Tables {
    alignas(64) float low[8] = {}, span[8] = {};                     // by exponent of p + 1/2, biased, modulo 8
    alignas(64) float threshold[8] = {}, slope[8] = {}, offset[8] = {};  // by thresholds reached, modulo 8
  };
  static constexpr Tables make_tables() {
    Tables tables;
    double last = 0;  // largest value below the decade
    for (int d = 0; d < kDecades; d++) {
      double top = 1;
      for (int i = d; i < kDecades - 1; i++) top /= 10;
      const double bins = kSigned ? 1 << d : 2 << d, width = 0.9 * top / bins;
      const int exponent = kSigned ? d : d + 1;
      tables.low[(exponent + 127) % 8] = static_cast<float>(top / 10);
      tables.span[(exponent + 127) % 8] = static_cast<float>(0.9 * top);
      tables.threshold[d] = static_cast<float>((last + top / 10 + width / 2) / 2);
      tables.slope[(d + 1) % 8] = static_cast<float>(1 / width);
      tables.offset[(d + 1) % 8] = static_cast<float>(-top / 10 / width);
      last = top - width / 2;
    }
    tables.threshold[kDecades] = static_cast<float>((last + 1) / 2);
    // 0 is p + 1/2 = 0.5 (signed) or 1.5, 1 is 2^decades + 0.5 or 2^(decades + 1) + 0.5: solve low + span * fraction = 0 and = 1.
    const double zero_fraction = kSigned ? 0.0 : 0.5, one_fraction = kSigned ? 0.5 / (1 << kDecades) : 0.5 / (2 << kDecades);
    const int of_zero = kSigned ? 126 % 8 : 127 % 8, of_one = kSigned ? (kDecades + 127) % 8 : (kDecades + 128) % 8;
    const float span = static_cast<float>(1 / (one_fraction - zero_fraction));
    for (const int entry : {of_zero, of_one}) {
      tables.span[entry] = span;
      tables.low[entry] = static_cast<float>(-zero_fraction) * span;
    }
    return tables;
  }
};

}  // namespace lowbit
