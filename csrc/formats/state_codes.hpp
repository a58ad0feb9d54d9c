// SPDX-License-Identifier: Apache-2.0
// What the codes of each StateFormat mean, per element, for StateCodes<format, is_signed>. A Decoder of a block's scale
// makes values of codes: it reads the floats 2^23 + code and gives two numbers whose product is the value (whoever uses
// it has an FMA for that). An Encoder of a block's absmax makes code - kOffset of values; where that is past the codes,
// stores saturate. kAbsmaxOverScale: the decoded value of the largest element of a block.
#pragma once

#include "formats/dynamic_map.hpp"
#include "formats/state_format.hpp"

namespace lowbit {

template <StateFormat, bool kSigned> struct StateCodes;

// Where the value is a function of the code, times the scale, and the code one of value / scale.
template <class Codes>
class ScaledDecoder {
 public:
  LOWBIT_INLINE explicit ScaledDecoder(float scale) : scale_(scale) {}
  template <class Float>
  LOWBIT_INLINE void operator()(Float number, Float& value, Float& factor) const {
    value = Codes::decode(number), factor = like(number, scale_);
  }

 private:
  float scale_;
};
template <class Codes>
class ScaledEncoder {
 public:
  LOWBIT_INLINE explicit ScaledEncoder(float absmax) : inverse_(Codes::kEncodedAbsmax / absmax) {}
  template <class Float>
  LOWBIT_INLINE auto operator()(Float value) const { return Codes::encode(mul(value, like(value, inverse_))); }

 private:
  float inverse_;
};

template <bool kSigned>
struct StateCodes<StateFormat::dynamic8, kSigned> : DynamicMap<kSigned, 7> {
  static constexpr bool kIsDynamic = true;
  static constexpr float kAbsmaxOverScale = 1;
};

template <>
struct StateCodes<StateFormat::dynamic4, true> : DynamicMap<true, 3> {
  static constexpr bool kIsDynamic = true;
  static constexpr float kAbsmaxOverScale = 1;
};

template <>
struct StateCodes<StateFormat::dynamic4,
                  false> {  // 1/16, 2/16 ... 1: no code of zero, only a block of zeros decodes to zeros
  using Decoder = ScaledDecoder<StateCodes>;
  using Encoder = ScaledEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = 1, kEncodedAbsmax = 16;
  static constexpr int kOffset = -1;
  static constexpr bool kIsDynamic = false;
  template <class Float>
  LOWBIT_INLINE static Float decode(Float number) {
    return fma(number, like(number, 1.0f / 16), like(number, (1 - 0x1p23f) / 16));
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) { return to_int(y); }
};

template <bool kSigned>
struct StateCodes<StateFormat::float8,
                  kSigned> {  // sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, all ones are nan
  using Decoder = ScaledDecoder<StateCodes>;
  using Encoder = ScaledEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = 448, kEncodedAbsmax = 448;
  static constexpr int kOffset = 0;
  static constexpr bool kIsDynamic = false;
  template <class Float>
  LOWBIT_INLINE static Float decode(Float number) {
    const auto code = bits_of(number), magnitude = bit_and(code, like(code, 0x7f));
    const Float count = to_float(magnitude);
    const auto subnormal = bits_of(mul(count, like(count, 0x1p-9f))),
               normal = add(shift_left<20>(magnitude), like(code, 120 << 23));
    const auto finite = select(at_least(count, like(count, 8.0f)), normal, subnormal);
    const auto value = select(at_least(count, like(count, 127.0f)), like(code, 0x7fc00000), finite);
    return float_of(bit_or(value, shift_left<24>(bit_and(code, like(code, 0x80)))));
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) {  // round to nearest even
    const Float a = min(abs(y), like(y, kEncodedAbsmax));
    const auto bits = bits_of(a);
    const auto odd = bit_and(shift_right<20>(bits), like(bits, 1));
    const auto normal = sub(shift_right<20>(add(add(bits, like(bits, 0x7ffff)), odd)), like(bits, 120 << 3));
    const auto subnormal =
        sub(bits_of(add(a, like(a, 0x1p14f))), like(bits, 0x46800000));  // the float adder rounds to multiples of 2^-9
    return bit_or(select(at_least(a, like(a, 0x1p-6f)), normal, subnormal), shift_left<7>(shift_right<31>(bits_of(y))));
  }
};

}  // namespace lowbit
