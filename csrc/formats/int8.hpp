// SPDX-License-Identifier: Apache-2.0
// int8: bytes in the order of ByteTile; stored unsigned, so that the product of unsigned by signed bytes serves both
// int8 and int4.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Int8 : IntegerCodec<8>, ByteTile {
  static constexpr float value_zero = 128;
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return int8_value<at>(Lanes::codes(unit)); }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int) { return 0; }
};

}  // namespace lowbit
