// SPDX-License-Identifier: Apache-2.0
// int4: rows of 64 bytes, 16 columns x 4 k, as int8; the low nibbles are k 0..31 of the tile, the high ones k 32..63.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Int4 : IntegerCodec<4> {
  static constexpr CodePosition position(int64_t column, int64_t k) {
    return {k % 32 / 4 * 64 + column * 4 + k % 4, k >= 32};
  }

  static constexpr int unit_values = 8, unit_bytes = 64;
  static constexpr float value_zero = 0;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at / 2 + at % 2 * 32; }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return int4_value<at>(Lanes::codes(unit)); }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int at) { return Lanes::int4_shift(at); }
};

}  // namespace lowbit
