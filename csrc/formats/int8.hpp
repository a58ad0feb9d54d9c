// SPDX-License-Identifier: Apache-2.0
// int8: bytes, as ByteTile has them; stored unsigned, so that one multiplication of unsigned by signed bytes serves it
// as it serves int4.
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
