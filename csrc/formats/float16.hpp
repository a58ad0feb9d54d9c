// SPDX-License-Identifier: Apache-2.0
// float16: rows of 16 columns, one k each.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Float16 : FloatCodec<16, 11> {
  using Code = uint16_t;
  LOWBIT_INLINE static Code encode(float w) { return float16_from_float(w); }
  LOWBIT_INLINE static float decode(Code code) { return float_from_float16(code); }
  static constexpr int64_t position(int64_t column, int64_t k) { return k * 32 + column * 2; }

  static constexpr int unit_values = 1, unit_bytes = 32;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int) { return unit; }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return Lanes::float16(unit); }
};

}  // namespace lowbit
