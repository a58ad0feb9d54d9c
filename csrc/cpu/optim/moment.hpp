// SPDX-License-Identifier: Apache-2.0
// One block of one moment: read as vectors of float32; written back once the whole block is known, because its scale is its largest value.
#pragma once

#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/state_codes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// 16 codes at element `at` of a tensor, zeros past `count`.
template <StateFormat kFormat>
LOWBIT_INLINE i32x16 load_state_codes(const uint8_t* codes, int64_t at, int64_t count) {
  constexpr bool kNibbles = kFormat == StateFormat::dynamic4;
  codes += kNibbles ? at / 2 : at;
  uint8_t tail[16] = {};
  if (count < 16) {
    for (int64_t i = 0; i < (kNibbles ? (count + 1) / 2 : count); i++) tail[i] = codes[i];
    codes = tail;
  }
  return kNibbles ? load_u4(codes) : load_u8(codes);
}

template <StateFormat kFormat>
LOWBIT_INLINE void store_state_codes(uint8_t* codes, int64_t at, int64_t count, i32x16 value) {
  constexpr bool kNibbles = kFormat == StateFormat::dynamic4;
  codes += kNibbles ? at / 2 : at;
  uint8_t tail[16];
  uint8_t* to = count < 16 ? tail : codes;
  if (kNibbles) store_u4(to, value);
  else store_u8(to, value);
  if (count < 16)
    for (int64_t i = 0; i < (kNibbles ? (count + 1) / 2 : count); i++) codes[i] = tail[i];
}

template <StateFormat kFormat, bool kSigned>
class Moment {
 public:
  // The block that begins at element `begin`; `values` is scratch for one block.
  LOWBIT_INLINE Moment(void* data, float* scale, int64_t begin, float* values)
      : data_(data), scale_(scale), begin_(begin), values_(values), old_scale_(scale ? *scale : 1.0f) {}

  LOWBIT_INLINE f32x16 read(int64_t i, int64_t count) const {
    if constexpr (!has_codes(kFormat)) return load_as_float(data_, kDType, begin_ + i, count);
    else return mul(StateCodes<kFormat, kSigned>::decode(load_state_codes<kFormat>(static_cast<uint8_t*>(data_), begin_ + i, count)), set1(old_scale_));
  }
  LOWBIT_INLINE void put(int64_t i, int64_t count, f32x16 value) {
    if constexpr (!has_codes(kFormat)) return store_from_float(data_, kDType, begin_ + i, count, value);
    store(values_ + i, value);
    absmax_ = cpu::LOWBIT_ISA_NAME::max(absmax_, bits_of(abs(value)));  // as integers nan is the largest, then inf: neither can be lost
  }
  // A block that holds inf or nan gets the scale nan, and so reads back as nan everywhere: nothing finite is made up from it.
  LOWBIT_INLINE void finish(int64_t count) {
    if constexpr (has_codes(kFormat)) {
      const float absmax = float_from_bits(static_cast<uint32_t>(largest(absmax_)));
      const bool finite = absmax < __builtin_inff(), tiny = absmax < 0x1p-126f;  // tiny: its inverse is infinite
      *scale_ = finite ? absmax / StateCodes<kFormat, kSigned>::kAbsmaxOverScale : __builtin_nanf("");
      const f32x16 inverse = set1(finite && !tiny ? 1.0f / absmax : 0.0f);
      const int64_t whole = count / 16 * 16;
      for (int64_t i = 0; i < whole; i += 16) encode(i, 16, inverse);
      if (whole < count) encode(whole, count - whole, inverse);
    }
  }

 private:
  static constexpr DType kDType = kFormat == StateFormat::bfloat16 ? DType::bfloat16 : DType::float32;

  LOWBIT_INLINE void encode(int64_t i, int64_t count, f32x16 inverse) {
    const i32x16 codes = StateCodes<kFormat, kSigned>::encode(mul(load(values_ + i), inverse));
    store_state_codes<kFormat>(static_cast<uint8_t*>(data_), begin_ + i, count, codes);
  }

  void* data_;
  float* scale_;
  int64_t begin_;
  float* values_;
  float old_scale_;
  i32x16 absmax_ = set1(0);
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
