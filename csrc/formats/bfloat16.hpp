// SPDX-License-Identifier: Apache-2.0
// bfloat16: rows of 16 columns x 2 k.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

struct BFloat16 : FloatCodec<16, 8> {
  using Code = uint16_t;
  LOWBIT_INLINE static Code encode(float w) { return bfloat16_from_float(w); }
  LOWBIT_INLINE static float decode(Code code) { return float_from_bfloat16(code); }
  static constexpr int64_t position(int64_t column, int64_t k) { return k / 2 * 64 + column * 4 + k % 2 * 2; }

  static constexpr int unit_values = 2, unit_bytes = 64;
  LOWBIT_INLINE static constexpr int64_t k_of(int64_t unit, int at) { return unit * 2 + at; }
  template <int at, class Lanes>
  LOWBIT_INLINE static auto value(const uint8_t* unit) { return bf16_pair_value<at>(Lanes::codes(unit)); }
};

}  // namespace lowbit
