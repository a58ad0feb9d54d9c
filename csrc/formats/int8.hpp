// SPDX-License-Identifier: Apache-2.0
// int8: rows of 64 bytes, 16 columns x 4 k; stored unsigned, so that one multiplication of unsigned by signed bytes
// serves it as it serves int4.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Int8 : IntegerCodec<8> {
  static constexpr CodePosition position(int64_t column, int64_t k) { return {k / 4 * 64 + column * 4 + k % 4, false}; }

  static constexpr int unit_values = 4, unit_bytes = 64;
  static constexpr float value_zero = 128;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 4 + at; }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return int8_value<at>(Lanes::codes(unit)); }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return 0; }
};

}  // namespace lowbit
