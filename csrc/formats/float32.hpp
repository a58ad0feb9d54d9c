// SPDX-License-Identifier: Apache-2.0
// float32: rows of 16 columns, one k each.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct Float32 : FloatCodec<32, 24> {
  using Code = uint32_t;
  static Code encode(float w) { return bits_of_float(w); }
  static float decode(Code code) { return float_from_bits(code); }
  static constexpr int64_t position(int64_t column, int64_t k) { return k * 64 + column * 4; }

  static constexpr int unit_values = 1, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int) { return unit; }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return Lanes::float32(unit); }
};

}  // namespace lowbit
