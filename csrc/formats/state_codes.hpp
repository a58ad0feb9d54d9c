// SPDX-License-Identifier: Apache-2.0
// What the codes of each StateFormat mean, per element: StateCodes<format, is_signed>::decode(code) gives value / scale, and an Encoder of a block's absmax
// makes codes of its values. kAbsmaxOverScale: the decoded value of the largest element of a block.
#pragma once

#include "formats/dynamic_map.hpp"
#include "formats/state_format.hpp"

namespace lowbit {

template <StateFormat, bool kSigned> struct StateCodes;

// Codes that are a function of value / absmax.
template <class Codes>
class RelativeEncoder {
 public:
  LOWBIT_INLINE explicit RelativeEncoder(float absmax) : inverse_(1.0f / absmax) {}
  template <class Float>
  LOWBIT_INLINE auto operator()(Float value) const { return Codes::encode(mul(value, like(value, inverse_))); }

 private:
  float inverse_;
};

template <bool kSigned>
struct StateCodes<StateFormat::dynamic8, kSigned> : DynamicMap<kSigned, 7> {
  static constexpr float kAbsmaxOverScale = 1;
};

template <>
struct StateCodes<StateFormat::dynamic4, true> : DynamicMap<true, 3> {
  static constexpr float kAbsmaxOverScale = 1;
};

template <>
struct StateCodes<StateFormat::dynamic4, false> {  // 1/16, 2/16 ... 1: no code of zero, only a block of zeros decodes to zeros
  using Encoder = RelativeEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = 1;
  template <class Int>
  LOWBIT_INLINE static auto decode(Int code) {
    const auto value = to_float(add(code, like(code, 1)));
    return mul(value, like(value, 1.0f / 16));
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {
    const auto code = to_int(fma(y, like(y, 16.0f), like(y, -1.0f)));
    return max(min(code, like(code, 15)), like(code, 0));
  }
};

template <bool kSigned>
struct StateCodes<StateFormat::float8, kSigned> {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones are nan
  using Encoder = RelativeEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = 448;
  template <class Int>
  LOWBIT_INLINE static auto decode(Int code) {
    const Int magnitude = bit_and(code, like(code, 0x7f));
    const auto number = to_float(magnitude);
    const Int subnormal = bits_of(mul(number, like(number, 0x1p-9f))), normal = add(shift_left<20>(magnitude), like(code, 120 << 23));
    const Int finite = select(at_least(number, like(number, 8.0f)), normal, subnormal);
    const Int value = select(at_least(number, like(number, 127.0f)), like(code, 0x7fc00000), finite);
    return float_of(bit_or(value, shift_left<24>(bit_and(code, like(code, 0x80)))));
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {  // round to nearest even
    const Float a = min(mul(abs(y), like(y, kAbsmaxOverScale)), like(y, kAbsmaxOverScale));
    const auto bits = bits_of(a);
    const auto odd = bit_and(shift_right<20>(bits), like(bits, 1));
    const auto normal = sub(shift_right<20>(add(add(bits, like(bits, 0x7ffff)), odd)), like(bits, 120 << 3));
    const auto subnormal = sub(bits_of(add(a, like(a, 0x1p14f))), like(bits, 0x46800000));  // the float adder rounds to multiples of 2^-9
    return bit_or(select(at_least(a, like(a, 0x1p-6f)), normal, subnormal), shift_left<7>(shift_right<31>(bits_of(y))));
  }
};

}  // namespace lowbit
