// SPDX-License-Identifier: Apache-2.0
// What a codec is: the meaning of the codes of one weight format, in one header each (int4.hpp ...), named in list.hpp.
//
//   bits               of one code
//   kind               floating: the code is the weight itself, without scales; integer: w = scale * (code - zero);
//                      lookup: w = scale * level(code), levels of any kind: a table of 16, or small floats
//   zero, code_max     the zero point of a symmetric weight (0 of a lookup format), and the largest code
//   code_of_zero       the code of weight 0 in a symmetric weight: padding
//   significant_bits   what a value before its scale takes, exactly
//   range              symmetric weights: scale = largest |w| / range
//   level(code)        what a code stands for before zero point and scale, and level_of(codes) of a vector;
//                      nearest(v): the codes of the nearest levels
//   position           where the code of (column, k) lies in a tile of 16 columns x 64 k
//   encode, decode     float formats: a weight to its code and back, exactly as a kernel rounds
// and for kernels, over any vector of 16 columns: a unit is unit_bytes of codes that hold unit_values weights of each
// column;
//   k_of(unit, at)     where value `at` of unit `unit` stands in the 64 k of its tile
//   value<at, Lanes>   that value as float: level - value_zero, times 2^shift(at) where a device reads it so. Lanes
//   loads 16 columns.
#pragma once

#include <string_view>

#include "core/dtype.hpp"

namespace lowbit {

inline constexpr int64_t kPanelColumns = 16, kTileK = 64;

enum class CodecKind : int { floating, integer, lookup };
inline constexpr std::string_view kCodecKindNames[] = {"float", "integer", "lookup"};

// Position of a weight inside a panel's codes: byte offset, and for codes of half a byte whether it is the high nibble.
struct CodePosition {
  int64_t byte;
  bool high;
};

template <int kBits>
struct FloatCodec {
  static constexpr int bits = kBits, zero = 0, code_of_zero = 0, code_max = 0;
  static constexpr CodecKind kind = CodecKind::floating;
  static constexpr float value_zero = 0;
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return 0; }
};

template <int kBits>
struct IntegerCodec {
  static constexpr int bits = kBits, significant_bits = kBits;
  static constexpr int zero = 1 << (kBits - 1), code_of_zero = zero, code_max = (1 << kBits) - 1;
  static constexpr CodecKind kind = CodecKind::integer;
  static constexpr float range = code_max / 2.0f;
  LOWBIT_INLINE static int level(int code) { return code; }
  template <class Int>
  LOWBIT_INLINE static auto level_of(Int codes) { return to_float(codes); }
  template <class Float>
  LOWBIT_INLINE static auto nearest(Float v) {
    return to_int(max(like(v, 0.0f), min(like(v, static_cast<float>(code_max)), v)));
  }
};

// Codes of half a byte, in rows of 64 bytes: 16 columns x 4 k; the low nibbles are k 0..31 of the tile, the high ones
// k 32..63. Value `at` of a unit is nibble `at` of each column's four bytes, counted from the lowest.
struct NibbleTile {
  static constexpr CodePosition position(int64_t column, int64_t k) {
    return {k % 32 / 4 * 64 + column * 4 + k % 4, k >= 32};
  }
  static constexpr int unit_values = 8, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at / 2 + at % 2 * 32; }
};

// Codes of a byte, in rows of 64: 16 columns x 4 k.
struct ByteTile {
  static constexpr CodePosition position(int64_t column, int64_t k) { return {k / 4 * 64 + column * 4 + k % 4, false}; }
  static constexpr int unit_values = 4, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at; }
};

// 16 levels by their codes, and in rising order with the code of each: the lowest one where two codes share a level.
struct Levels {
  alignas(64) float of_code[16];
  alignas(64) float rising[16], code_of_rising[16];

  explicit consteval Levels(const float (&table)[16]) : of_code(), rising(), code_of_rising() {
    for (int code = 0; code < 16; code++) {
      of_code[code] = table[code];
      int at = code;
      for (; at > 0 && rising[at - 1] > table[code]; at--) rising[at] = rising[at - 1];
      rising[at] = table[code];
    }
    for (int at = 0; at < 16; at++)
      while (table[static_cast<int>(code_of_rising[at])] != rising[at]) code_of_rising[at]++;
  }
};

// Codes of 4 bits that stand for 16 levels: Codec::levels() has them, in an unnamed namespace of the codec's header,
// as nothing weak may be shared between instruction sets.
template <class Codec, int kCodeOfZero>
struct LookupCodec : NibbleTile {
  static constexpr int bits = 4, significant_bits = 24;  // levels are any float32
  static constexpr int zero = 0, code_of_zero = kCodeOfZero, code_max = 15;
  static constexpr CodecKind kind = CodecKind::lookup;
  static constexpr float value_zero = 0;
  LOWBIT_INLINE static float level(int code) { return Codec::levels().of_code[code]; }
  template <class Int>
  LOWBIT_INLINE static auto level_of(Int codes) { return lookup16(Codec::levels().of_code, codes); }
  template <class Float>
  LOWBIT_INLINE static auto nearest(Float v) {  // one less for each middle of two levels that v is not above
    const float* rising = Codec::levels().rising;
    auto at = to_int(like(v, static_cast<float>(code_max)));
    for (int i = 0; i < code_max; i++) at = add(at, at_least(like(v, (rising[i] + rising[i + 1]) / 2), v));
    return to_int(lookup16(Codec::levels().code_of_rising, at));
  }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) {
    return level_of(shift_right<4 * at>(Lanes::words(unit)));
  }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return 0; }
};

}  // namespace lowbit
