// SPDX-License-Identifier: Apache-2.0
// fp8_e4m3: float8_e4m3fn bytes, times a scale per column or group; the codes of nan are never written.
#pragma once

#include "formats/codec.hpp"
#include "formats/e4m3.hpp"

namespace lowbit {

struct Fp8E4M3 : ByteTile {
  static constexpr int bits = 8, stored_bits = bits, significant_bits = 4, zero = 0, code_of_zero = 0, code_max = 255,
                       smallest_group = 32;
  static constexpr CodecKind kind = CodecKind::lookup;
  static constexpr float value_zero = 0, integer_unit = 0, range = E4M3::largest;
  LOWBIT_INLINE static float level(int code) { return E4M3::decode(code); }
  template <class Int>
  LOWBIT_INLINE static auto level_of(Int codes) { return E4M3::decode(codes); }
  template <class Float>
  LOWBIT_INLINE static auto nearest(Float v) { return E4M3::encode(v); }

  // The level times 2^-8. Exponent and mantissa are shifted to their position in float32, below the bits of a
  // larger exponent: u. A subnormal has no leading 1: it is 2 u - 2^-14, which is larger than u for all others. No
  // intermediate float32 is subnormal: a product with one took 160 cycles (Sapphire Rapids), and flushing would
  // make it 0.
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) {
    const auto words = Lanes::words(unit);
    const auto magnitude = bit_and(moved<at>(words), like(words, 0x07f00000));
    const auto u = float_of(bit_or(magnitude, like(words, 112 << 23)));
    const auto level = min(u, fma(u, like(u, 2.0f), like(u, -0x1p-14f)));
    return float_of(bit_or(bits_of(level), bit_and(shift_left<24 - 8 * at>(words), like(words, INT32_MIN))));
  }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return -8; }

  // For a unit without subnormals and zeros, as 99 of 100 are, values are u with its sign: a shift and a bit operation
  // instead of five (m = 1 on AVX-512: 1.75 times the speed).
  template <class Lanes>
  LOWBIT_INLINE static bool is_plain(const uint8_t* unit) { return all_bytes_have(Lanes::words(unit), 0x78); }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto plain_value(const uint8_t* unit) {
    auto word = Lanes::words(unit);
    if constexpr (at < 3) word = shift_left<24 - 8 * at>(word);
    const auto moved = bit_and(shift_right_signed<4>(word), like(word, static_cast<int32_t>(0x87f00000)));
    return float_of(bit_or(moved, like(word, 112 << 23)));
  }

 private:
  template <int at, class Int>
  LOWBIT_INLINE static Int moved(Int words) {  // byte `at` to bits 20..27
    if constexpr (at == 3) return shift_right<4>(words);
    else return shift_left<20 - 8 * at>(words);
  }
};

}  // namespace lowbit
