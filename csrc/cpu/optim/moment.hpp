// SPDX-License-Identifier: Apache-2.0
// Moments between codes and float32. The scale of a block is its largest value, so the whole block is known before a code is written.
#pragma once

#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/state_codes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// 16 codes, of which `count` are there; the others read as code 0.
template <StateFormat kFormat>
LOWBIT_INLINE i32x16 load_state_codes(const uint8_t* codes, int64_t count) {
  constexpr bool kNibbles = kFormat == StateFormat::dynamic4;
  uint8_t tail[16] = {};
  if (count < 16) {
    for (int64_t i = 0; i < (kNibbles ? (count + 1) / 2 : count); i++) tail[i] = codes[i];
    codes = tail;
  }
  return kNibbles ? load_u4(codes) : load_u8(codes);
}

template <StateFormat kFormat>
LOWBIT_INLINE void store_state_codes(uint8_t* codes, int64_t count, i32x16 value) {
  constexpr bool kNibbles = kFormat == StateFormat::dynamic4;
  uint8_t tail[16];
  uint8_t* to = count < 16 ? tail : codes;
  if (kNibbles) store_u4(to, value);
  else store_u8(to, value);
  if (count < 16)
    for (int64_t i = 0; i < (kNibbles ? (count + 1) / 2 : count); i++) codes[i] = tail[i];
}

// 16 values of which `count` are there, and zeros.
template <StateFormat kFormat, bool kSigned>
LOWBIT_INLINE f32x16 decode_vector(const uint8_t* codes, f32x16 scale, int64_t count) {
  const f32x16 value = mul(StateCodes<kFormat, kSigned>::decode(load_state_codes<kFormat>(codes, count)), scale);
  if (count >= 16) return value;
  alignas(64) float lanes[16];
  store(lanes, value);
  for (int64_t i = count; i < 16; i++) lanes[i] = 0.0f;
  return load(lanes);
}

// Sets the scale from the bits of the largest |value|: as integers nan is the largest, then inf, so neither can be lost. A block with one of them gets the
// scale nan and reads back as nan everywhere: nothing finite is made up. A scale below 2^-126 has no inverse: such a block becomes zeros. Returns absmax,
// or 0 for these two, whose codes are written here. Values that an encoder cannot take are multiplied by a power of two.
template <StateFormat kFormat, bool kSigned>
LOWBIT_INLINE float set_scale(i32x16 absmax_bits, int64_t count, float* values, uint8_t* codes, float* scale) {
  using Codes = StateCodes<kFormat, kSigned>;
  const float absmax = float_from_bits(static_cast<uint32_t>(largest(absmax_bits))), unit = absmax / Codes::kAbsmaxOverScale;
  const bool finite = absmax < __builtin_inff();
  if (finite && unit >= 0x1p-126f) [[likely]] {
    *scale = unit;
    if (absmax >= 0x1p-96f && absmax <= 0x1p96f) [[likely]] return absmax;
    const float factor = absmax < 1.0f ? 0x1p64f : 0x1p-64f;
    for (int64_t i = 0; i < count; i++) values[i] *= factor;
    return absmax * factor;
  }
  *scale = finite ? 0.0f : __builtin_nanf("");
  alignas(64) uint8_t zeros[16];
  store_state_codes<kFormat>(zeros, 16, typename Codes::Encoder(1.0f)(set1(0.0f)));
  for (int64_t i = 0; i < state_bytes(kFormat, count); i++) codes[i] = zeros[0];
  return 0.0f;
}

// Codes and scale of a block of values, at most kMaxStateBlock; `values` are lost.
template <StateFormat kFormat, bool kSigned>
LOWBIT_INLINE void encode_block(i32x16 absmax_bits, int64_t count, float* values, uint8_t* codes, float* scale) {
  const float absmax = set_scale<kFormat, kSigned>(absmax_bits, count, values, codes, scale);
  if (absmax == 0.0f) return;
  const typename StateCodes<kFormat, kSigned>::Encoder encode(absmax);
  const int64_t whole = count / 16 * 16;
  for (int64_t i = 0; i < whole; i += 16) store_state_codes<kFormat>(codes + state_bytes(kFormat, i), 16, encode(load(values + i)));
  if (whole < count) store_state_codes<kFormat>(codes + state_bytes(kFormat, whole), count - whole, encode(load(values + whole)));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
