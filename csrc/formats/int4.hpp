// SPDX-License-Identifier: Apache-2.0
// int4: nibbles in the order of NibbleTile.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Int4 : IntegerCodec<4>, NibbleTile {
  static constexpr float value_zero = 0;
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return int4_value<at>(Lanes::codes(unit)); }
  template <class Lanes>
  LOWBIT_INLINE static constexpr int shift(int at) { return Lanes::int4_shift(at); }
};

}  // namespace lowbit
