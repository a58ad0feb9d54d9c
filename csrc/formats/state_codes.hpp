// SPDX-License-Identifier: Apache-2.0
// The codes of each StateFormat, per element: StateCodes<format, is_signed>. A Decoder, made with a block's scale,
// reads the floats 2^23 + code and returns two numbers whose product is the value (its user has an FMA for that). An
// Encoder, made with a block's absmax, turns values into code - kOffset; stores saturate values beyond the codes.
// Table: storage of tables of 8 entries. kAbsmaxOverScale: the decoded value of the largest element of a block.
//
// A moment that cannot be negative is a mean of squares, whose root divides the step. If it rounded to 0 and the other
// moment did not, the next step would be that moment / eps, thousands of learning rates long. So a value above 0 gets
// at least the smallest code above that of 0; 0 stays 0.
#pragma once

#include "formats/dynamic_map.hpp"
#include "formats/e4m3.hpp"
#include "formats/state_format.hpp"

namespace lowbit {

template <StateFormat, bool kSigned, class Table = dynamic::ScaledTable> struct StateCodes;

// The code of a value, at least kSmallest if the value is above 0 (and not the smallest subnormal, whose bits are 1).
template <int kSmallest, class Int, class Float>
LOWBIT_INLINE Int kept_above_zero(Int code, Float value) {
  if constexpr (kSmallest > 0) return max(code, min(bits_of(value), like(code, kSmallest)));
  else return code;
}

// For formats with value = f(code) * scale and code = g(value / scale).
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
  LOWBIT_INLINE auto operator()(Float value) const {
    return kept_above_zero<Codes::kSmallest>(Codes::encode(mul(value, like(value, inverse_))), value);
  }

 private:
  float inverse_;
};

template <bool kSigned, class Table>
struct StateCodes<StateFormat::dynamic8, kSigned, Table> : DynamicMap<kSigned, 7, Table> {
  static constexpr bool kIsDynamic = true;
  static constexpr float kAbsmaxOverScale = 1;

  class Encoder : public DynamicMap<kSigned, 7, Table>::Encoder {
    using Nearest = typename DynamicMap<kSigned, 7, Table>::Encoder;

   public:
    using Nearest::Nearest;
    template <class Float, class Int>
    LOWBIT_INLINE Int code(Float value, Float a, Int shift) const {
      return kept_above_zero<kSigned ? 0 : 1 - StateCodes::kOffset>(Nearest::code(value, a, shift), value);
    }
  };
};

template <class Table>
struct StateCodes<StateFormat::dynamic4, true, Table> : DynamicMap<true, 3, Table> {
  static constexpr bool kIsDynamic = true;
  static constexpr float kAbsmaxOverScale = 1;
};

template <class Table>  // 1/16, 2/16 ... 1: no code for zero; only a block of zeros decodes to zeros
struct StateCodes<StateFormat::dynamic4, false, Table> {
  using Decoder = ScaledDecoder<StateCodes>;
  using Encoder = ScaledEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = 1, kEncodedAbsmax = 16;
  static constexpr int kOffset = -1, kSmallest = 0;
  static constexpr bool kIsDynamic = false;
  template <class Float>
  LOWBIT_INLINE static Float decode(Float number) {
    return fma(number, like(number, 1.0f / 16), like(number, (1 - 0x1p23f) / 16));
  }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) { return to_int(y); }
};

template <bool kSigned, class Table>
struct StateCodes<StateFormat::float8, kSigned, Table> {
  using Decoder = ScaledDecoder<StateCodes>;
  using Encoder = ScaledEncoder<StateCodes>;
  static constexpr float kAbsmaxOverScale = E4M3::largest, kEncodedAbsmax = E4M3::largest;
  static constexpr int kOffset = 0, kSmallest = kSigned ? 0 : 1;
  static constexpr bool kIsDynamic = false;
  template <class Float>
  LOWBIT_INLINE static Float decode(Float number) { return E4M3::decode(bits_of(number)); }
  template <class Float>
  LOWBIT_INLINE static auto encode(Float y) { return E4M3::encode(y); }
};

}  // namespace lowbit
