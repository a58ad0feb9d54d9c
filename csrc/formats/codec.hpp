// SPDX-License-Identifier: Apache-2.0
// A codec defines the meaning of the codes of one weight format. Each has a header (int4.hpp ...); list.hpp names them.
//
//   bits               bits of a code; stored_bits: bits of a weight in panels
//   kind               floating: the code is the weight itself, without scales; integer: w = scale * (code - zero);
//                      lookup: w = scale * level(code), levels of any kind: a table of 16, or small floats;
//                      semi_sparse: as integer, at most two of each four neighbours along k are not 0 (2:4)
//   zero, code_max     the zero point of a symmetric weight (0 for a lookup format), and the largest code
//   code_of_zero       the code of weight 0 in a symmetric weight: padding
//   significant_bits   bits that represent every value before scaling exactly
//   integer_unit       values before scaling are integers of at most 8 bits times this, so that int8 activations are
//                      multiplied exactly; 0: they are not
//   byte_levels        lookup formats with an integer_unit: the levels as bytes
//   range              lookup formats: scale = largest |w| / range
//   level(code)        the value of a code before zero point and scale, and level_of(codes) of a vector;
//                      nearest(v): lookup formats, the codes of the nearest levels
//   smallest_group     min group size along k
//   encode, decode     float formats: a weight to its code and back, with a kernel's rounding
//   position           float formats: the byte of the code of (column, k) in a tile of 16 columns x 64 k; the codes
//                      of other formats are stored in planes (piece_of_code)
// and for kernels, over any vector of 16 columns: a unit is unit_bytes of codes with unit_values weights
// of each column;
//   k_of(unit, at)     the k, within the 64 of the tile, of value `at` of unit `unit`
//   value<at, Lanes>   that value as float: level - value_zero, times 2^shift(at) if a device reads it so. Lanes
//   loads 16 columns.
//   plain_value<at, Lanes>  in some codecs: the same in fewer operations, for units with is_plain<Lanes>(unit)
#pragma once

#include <string_view>

#include "core/dtype.hpp"

namespace lowbit {

inline constexpr int64_t kPanelColumns = 16, kTileK = 64;

enum class CodecKind : int { floating, integer, lookup, semi_sparse };
inline constexpr std::string_view kCodecKindNames[] = {"float", "integer", "lookup", "semi_sparse"};

// The position of some bits of a code: from bit `shift` of a byte on, continued in the next byte if necessary.
struct CodePosition {
  int64_t byte;
  int shift;
};

// Codes of 1 to 8 bits in a tile of 16 columns x 64 k, 128 bytes per bit. A code is cut into pieces of 8, 4, 2 and 1
// bits that add up to its bits (7 = 4 + 2 + 1), and each piece has its own plane: 2 * count rows of 64 bytes, 16
// columns x 4 k. A byte holds the pieces of k, k + 8 count, k + 16 count ..., from its lowest bits on: int4 is 8 rows,
// with k 0..31 in the low nibbles and k 32..63 in the high ones. Smaller pieces come first, in the tile as in the code.
LOWBIT_INLINE constexpr int bits_before_piece(int bits, int count) { return bits & (count - 1); }
LOWBIT_INLINE constexpr CodePosition piece_of_code(int bits, int count, int64_t column, int64_t k) {
  const int64_t step = k / 4, rows = 2 * count;
  return {bits_before_piece(bits, count) * 128 + step % rows * 64 + column * 4 + k % 4,
          count * static_cast<int>(step / rows)};
}

template <int kBits, int kSignificantBits>
struct FloatCodec {
  static constexpr int bits = kBits, stored_bits = bits, significant_bits = kSignificantBits;
  static constexpr int zero = 0, code_of_zero = 0, code_max = 0, smallest_group = 0;
  static constexpr CodecKind kind = CodecKind::floating;
  static constexpr float value_zero = 0, integer_unit = 0;
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return 0; }
};

template <int kBits>
struct IntegerCodec {
  static constexpr int bits = kBits, stored_bits = bits, significant_bits = kBits;
  static constexpr int zero = 1 << (kBits - 1), code_of_zero = zero, code_max = (1 << kBits) - 1;
  static constexpr CodecKind kind = CodecKind::integer;
  static constexpr int smallest_group = 32;
  static constexpr float integer_unit = 1;
  LOWBIT_INLINE static constexpr int level(int code) { return code; }
  template <class Int>
  LOWBIT_INLINE static auto level_of(Int codes) { return to_float(codes); }
};

// Units of 4-bit codes. Value `at` of a unit is nibble `at` of each column's four bytes, counted from the lowest.
struct NibbleTile {
  static constexpr int unit_values = 8, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at / 2 + at % 2 * 32; }
};

struct ByteTile {
  static constexpr int unit_values = 4, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at; }
};

// 16 levels by code, and in ascending order with the code of each: the lowest code if two share a level.
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

// 16 levels that are integers times `unit`, by code: as integers, plus the largest of them, `offset`, so that none is
// negative.
struct ByteLevels {
  alignas(64) uint8_t of_code[16];
  int offset;

  consteval ByteLevels(const Levels& levels, float unit)
      : of_code(), offset(static_cast<int>(levels.rising[15] / unit)) {
    for (int code = 0; code < 16; code++)
      of_code[code] = static_cast<uint8_t>(static_cast<int>(levels.of_code[code] / unit) + offset);
  }
};

// 4-bit codes of 16 levels: Codec::levels() returns them from an unnamed namespace in the codec's header, as
// instruction sets must not share weak symbols.
template <class Codec, int kCodeOfZero>
struct LookupCodec : NibbleTile {
  static constexpr int bits = 4, stored_bits = bits, significant_bits = 24;  // levels are any float32
  static constexpr int zero = 0, code_of_zero = kCodeOfZero, code_max = 15, smallest_group = 32;
  static constexpr CodecKind kind = CodecKind::lookup;
  static constexpr float value_zero = 0, integer_unit = 0;
  LOWBIT_INLINE static constexpr float level(int code) { return Codec::levels().of_code[code]; }
  template <class Int>
  LOWBIT_INLINE static auto level_of(Int codes) { return lookup16(Codec::levels().of_code, codes); }
  template <class Float>
  LOWBIT_INLINE static auto nearest(Float v) {  // one less for each midpoint of two levels that v is not above
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

// The members that list.hpp requires of every codec: the compiler names a missing one.
template <class Codec>
concept HasFacts = requires {
  Codec::bits;
  Codec::stored_bits;
  Codec::kind;
  Codec::zero;
  Codec::code_max;
  Codec::code_of_zero;
  Codec::significant_bits;
  Codec::integer_unit;
  Codec::smallest_group;
};

template <class Codec>
concept HasFloatCodes = requires(typename Codec::Code code, float weight, int64_t at) {
  Codec::encode(weight);
  Codec::decode(code);
  Codec::position(at, at);
};

template <class Codec>
concept HasLevels = requires(int code) {
  Codec::range;
  Codec::level(code);
};

// Integers of other widths are read as int8 (read_as of list.hpp).
template <class Codec>
concept HasUnits = requires(int64_t unit) {
  Codec::value_zero;
  Codec::unit_values;
  Codec::unit_bytes;
  Codec::k_of(unit, 0);
};

template <class Codec>
consteval bool bytes_are_levels() {
  for (int code = 0; code < 16; code++) {
    const int integer = Codec::byte_levels().of_code[code] - Codec::byte_levels().offset;
    if (static_cast<float>(integer) * Codec::integer_unit != Codec::level(code)) return false;
  }
  return true;
}

template <class Codec>
consteval bool is_codec() {
  static_assert(HasFacts<Codec>);
  constexpr CodecKind kKind = Codec::kind;
  if constexpr (kKind == CodecKind::floating) static_assert(HasFloatCodes<Codec>);
  if constexpr (kKind == CodecKind::lookup) static_assert(HasLevels<Codec>);
  if constexpr (kKind == CodecKind::lookup && Codec::integer_unit != 0) static_assert(bytes_are_levels<Codec>());
  if constexpr (kKind != CodecKind::integer || Codec::bits == 8 || Codec::bits == 4) static_assert(HasUnits<Codec>);
  return true;
}

}  // namespace lowbit
