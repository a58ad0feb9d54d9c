// SPDX-License-Identifier: Apache-2.0
// The dynamic maps of 8-bit optimizers (Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv
// 2110.02861), in closed form.
//
// A map has `decades` decades [T / 10, T], T = 10^-(decades - 1) .. 1. Decade d (0 is the smallest) is divided into
// bins of equal width, 2^d of them in a signed map and 2^(d+1) in an unsigned one; a code stands for the center of its
// bin. 0 and 1 have codes of their own, and a signed map has the negative bins too. Sorted by value: the signed code of
// 0 is 2^decades - 1, the unsigned one 0; the largest code stands for 1.
//
// So the number p of a positive code (signed: code - zero; unsigned: code + 1) is first + bin, and the first of a
// decade is a power of two: the exponent of float(p) is the decade, and within a decade value and p are linear in each
// other. Decoding needs no search or gather: the constants of the decades are in tables of 8 entries, a permutation of
// one register. Decoded values equal those of the map to 6 roundings of float32 (bitsandbytes' table is computed in
// float32 and off by 3). In a signed map value = slope (p - lean first), whose sign is that of p.
//
// Encoding: stretched to q = 1 + (y - T / 10) / (0.9 T) in [1, 2), a decade has its bins in the leading bits of the
// mantissa: with the hidden bit they are p, so p is one shift of q's bits. Codes are the nearest ones unless y is
// within 6e-7 y of the midpoint of two values: q has 24 bits, and at the lower end of a decade only a ninth of it is y.
#pragma once

#include <cstdint>

#include "core/dtype.hpp"

namespace lowbit {

namespace dynamic {

constexpr int kGuess = 164;  // out of 2^16: a decade, 3.32 * 128 units of a float's upper half, is about one guess

struct Tables {  // 8 entries, twice, as lookup8 requires
  alignas(64) float slope[16] = {};  // decode, by the exponent of float(p), modulo 8; signed p / 128
  alignas(64) float offset[16] = {};                       // unsigned: the summand; signed: - lean
  alignas(64) float threshold[16] = {}, stretch[16] = {};  // encode, by shift modulo 8
  int lead = 0;                                            // encode: added to the upper half of absmax
};

// The shift of q's mantissa bits: one less for each higher decade; `decades` is the shift for code 1, and -1
// for code 0.
constexpr int shift_of(bool is_signed, int decade) { return (is_signed ? 23 : 22) - decade; }

constexpr Tables make_tables(bool is_signed, int decades) {
  Tables tables;
  double below = 0;  // the value before the first one of the decade
  for (int d = 0; d < decades; d++) {
    double top = 1;
    for (int i = d; i < decades - 1; i++) top /= 10;
    const int bins = is_signed ? 1 << d : 2 << d, exponent = (d + 128) % 8, shift = shift_of(is_signed, d);
    const double width = 0.9 * top / bins, value = top / 10 + width / 2;
    if (is_signed) {  // T / 10 + (bin + 1 / 2) width = width (p - lean bins)
      tables.slope[exponent] = static_cast<float>(128 * width);
      tables.offset[exponent] = static_cast<float>(0.5 / bins - 8.0 / 9);
    } else {  // the offset cancels the rounding of the slope at the first value, the smallest
      tables.slope[exponent] = static_cast<float>(width);
      tables.offset[exponent] = static_cast<float>(value - static_cast<double>(tables.slope[exponent]) * bins);
    }
    tables.threshold[(shift + 1) % 8] = static_cast<float>((below + value) / 2);
    tables.stretch[shift % 8] = static_cast<float>(1 / (0.9 * top));
    below = value + (bins - 1) * width;
  }
  const int shift = shift_of(is_signed, decades), exponent = (decades + 128) % 8, one = (is_signed ? 1 : 2) << decades;
  tables.threshold[(shift + 1) % 8] = static_cast<float>((below + 1) / 2);
  // From the threshold to 1: the first bin.
  tables.stretch[shift % 8] = static_cast<float>(1.00001 / 9 / ((below + 1) / 2));
  // Unsigned: p = 1 gives 0 and p = one gives 1.
  tables.slope[exponent] = static_cast<float>(is_signed ? 128.0 / one : 1.0 / (one - 1));
  tables.offset[exponent] = is_signed ? 0.0f : -tables.slope[exponent];
  tables.lead = ((shift + 2) * 65536 + kGuess - 1) / kGuess - 220;
  for (int i = 8; i < 16; i++) {
    tables.slope[i] = tables.slope[i - 8], tables.offset[i] = tables.offset[i - 8];
    tables.threshold[i] = tables.threshold[i - 8], tables.stretch[i] = tables.stretch[i - 8];
  }
  return tables;
}

constexpr int upper_half(float y) { return static_cast<int>(__builtin_bit_cast(uint32_t, y) >> 16); }

// Whether Encoder's guesses are good enough: at the threshold to a decade the guess must be the next lower shift,
// wherever in its binade absmax is. A float's bits as a logarithm are off by at most 0.086 of a binade, 11 units, and
// two more are cut off.
constexpr bool guesses_are_close(const Tables& tables, bool is_signed, int decades) {
  for (int d = 0; d <= decades; d++) {
    const int shift = shift_of(is_signed, d), steps = upper_half(1.0f) - upper_half(tables.threshold[(shift + 1) % 8]);
    for (int error = -13; error <= 13; error++)
      if (steps + error >= 0 && ((tables.lead + steps + error) * kGuess) >> 16 != shift + 1) return false;
  }
  return (tables.lead * kGuess) >> 16 == shift_of(is_signed, decades) + 1;
}

// A float's bits approximate its logarithm, so the difference of absmax's bits and a's, scaled, approximates the decade
// of a. top: the upper half of absmax's bits, with Tables::lead. A device may have its own function for this.
template <class Int>
LOWBIT_INLINE Int guessed_shift(Int top, Int bits, int guess) {
  return shift_right<16>(mul_high_u16(sub_saturating_u16(top, bits), like(top, guess << 16)));
}

// A table times a factor, in memory for vector look-ups. A device with other storage has its own type.
class ScaledTable {
 public:
  LOWBIT_INLINE ScaledTable(const float* entries, float factor) {
    for (int i = 0; i < 16; i++) entry_[i] = entries[i] * factor;
  }
  LOWBIT_INLINE operator const float*() const { return entry_; }

 private:
  alignas(64) float entry_[16];
};

}  // namespace dynamic

namespace {  // one copy per object: these are compiled for several instruction sets, and nothing weak may be shared
             // between them
template <bool kSigned, int kDecades>
constexpr dynamic::Tables kDynamicTables = dynamic::make_tables(kSigned, kDecades);
}

template <bool kSigned, int kDecades, class Table = dynamic::ScaledTable>
struct DynamicMap {
  static constexpr int kZero = kSigned ? (1 << kDecades) - 1 : 0;  // the code of 0
  // code - p: with it 0 gets code -1, as does -1 in a signed map: stores saturate.
  static constexpr int kOffset = kSigned ? kZero : -1;

  static_assert(kSigned ? kDecades < 8 : kDecades == 7, "a table has 8 entries");
  static_assert(dynamic::guesses_are_close(kDynamicTables<kSigned, kDecades>, kSigned, kDecades));

  // Decodes codes to value * scale, times `factor`. Takes them as the floats 2^23 + code.
  class Decoder {
   public:
    LOWBIT_INLINE explicit Decoder(float factor)
        : slope_(kDynamicTables<kSigned, kDecades>.slope, factor), factor_(factor) {}
    template <class Float>
    LOWBIT_INLINE void operator()(Float number, Float& value, Float& scale) const {
      if constexpr (kSigned) {  // p = 0, whose exponent is 0, takes the slope of p = 1; slope * factor, counted by 128
                                // p, is normal or of no weight
        const Float p = fma(number, like(number, 1.0f / 128), like(number, -(0x1p23f + kZero) / 128));
        const auto decade = shift_right<23>(bits_of(p));
        const Float first = float_of(bit_and(bits_of(p), like(decade, static_cast<int32_t>(0xff800000))));
        value = fma(first, lookup8(kDynamicTables<kSigned, kDecades>.offset, decade), p);
        scale = lookup8(slope_, decade);
      } else {  // the codes of 0 and 1 share an entry, whose line passes through both
        const Float p = add(number, like(number, 1 - 0x1p23f));
        const auto decade = shift_right<23>(bits_of(p));
        value = fma(p, lookup8(kDynamicTables<kSigned, kDecades>.slope, decade),
                    lookup8(kDynamicTables<kSigned, kDecades>.offset, decade));
        scale = like(number, factor_);
      }
    }

   private:
    Table slope_;
    float factor_;
  };

  // Encodes the values of a block to the nearest codes; absmax is in [2^-96, 2^96], which keeps the tables normal.
  class Encoder {
   public:
    LOWBIT_INLINE explicit Encoder(float absmax)
        : threshold_(kDynamicTables<kSigned, kDecades>.threshold, absmax),
          stretch_(kDynamicTables<kSigned, kDecades>.stretch, 1.0f / absmax),
          top_((dynamic::upper_half(absmax) + kDynamicTables<kSigned, kDecades>.lead) << 16) {}
    // The decade of |value|, as the shift that encodes it. The guess is its shift or one more (checked above), so one
    // comparison decides. Below the first decade it may be any larger number, which shifts all bits out.
    template <class Float>
    LOWBIT_INLINE auto shift(Float a) const {
      using dynamic::guessed_shift;
      const auto guess = guessed_shift(like(bits_of(a), top_), bits_of(a), dynamic::kGuess);
      return count_down_above(guess, a, lookup8(threshold_, guess));
    }
    // code - kOffset of `value`, whose absolute value is a.
    template <class Float, class Int>
    LOWBIT_INLINE Int code(Float value, Float a, Int shift) const {
      const Float q = fma(a, lookup8(stretch_, shift), like(a, 8.0f / 9));
      // q below 2: values from the last bin up to the threshold belong to that bin.
      const Int inside = min(bits_of(q), like(shift, 0x3fffffff));
      const Int p = shift_right(bit_and(inside, like(shift, 0xffffff)), shift);
      if constexpr (kSigned) return negate_where_negative(p, value);
      else return p;
    }

   private:
    Table threshold_, stretch_;
    int32_t top_;
  };
};

}  // namespace lowbit
