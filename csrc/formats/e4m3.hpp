// SPDX-License-Identifier: Apache-2.0
// float8_e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones are nan. Over any vector.
#pragma once

#include "core/dtype.hpp"

namespace lowbit {

struct E4M3 {
  static constexpr float largest = 448;

  // The low 8 bits are the codes.
  template <class Int>
  LOWBIT_INLINE static auto decode(Int code) {
    const auto magnitude = bit_and(code, like(code, 0x7f));
    const auto count = to_float(magnitude);
    const auto subnormal = bits_of(mul(count, like(count, 0x1p-9f))),
               normal = add(shift_left<20>(magnitude), like(code, 120 << 23));
    const auto finite = select(at_least(count, like(count, 8.0f)), normal, subnormal);
    const auto value = select(at_least(count, like(count, 127.0f)), like(code, 0x7fc00000), finite);
    return float_of(bit_or(value, shift_left<24>(bit_and(code, like(code, 0x80)))));
  }
  LOWBIT_INLINE static float decode(int code) {  // through float16, whose bias is 8 more
    const uint16_t half = static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7);
    return (code & 0x7f) == 0x7f ? __builtin_nanf("") : float_from_float16(half) * 256.0f;
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {  // round to nearest even; beyond the largest: the largest
    const Float a = min(abs(y), like(y, largest));
    const auto bits = bits_of(a);
    const auto odd = bit_and(shift_right<20>(bits), like(bits, 1));
    const auto normal = sub(shift_right<20>(add(add(bits, like(bits, 0x7ffff)), odd)), like(bits, 120 << 3));
    // A float addition rounds to multiples of 2^-9.
    const auto subnormal = sub(bits_of(add(a, like(a, 0x1p14f))), like(bits, 0x46800000));
    return bit_or(select(at_least(a, like(a, 0x1p-6f)), normal, subnormal), shift_left<7>(shift_right<31>(bits_of(y))));
  }
};

}  // namespace lowbit
