// SPDX-License-Identifier: Apache-2.0
// Conversion of moments between codes and float32, 32 elements at a time. The scale of a block is its largest
// magnitude, so a block is complete before its codes are written.
#pragma once

#include "cpu/loops.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "formats/state_codes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kGroup = 32;  // elements per read or write of codes
static_assert(kMinStateBlock % kGroup == 0);

// The first `count` values, then zeros.
LOWBIT_INLINE f32x16 first_lanes(f32x16 values, int64_t count) {
  if (count >= 16) return values;
  alignas(64) float lanes[16];
  store(lanes, values);
  for (int64_t i = count < 0 ? 0 : count; i < 16; i++) lanes[i] = 0.0f;
  return load(lanes);
}

// 32 values times factor, with zeros after the first `count`.
template <StateFormat kFormat, class Decoder>
LOWBIT_INLINE void decode_group(const Decoder& decoder, const uint8_t* codes, int64_t count, f32x16 (&value)[2],
                                f32x16 (&factor)[2]) {
  uint8_t some[kGroup] = {};
  if (count < kGroup) {
    for (int64_t i = 0; i < state_bytes(kFormat, count); i++) some[i] = codes[i];
    codes = some;
  }
  f32x16 number[2];
  if constexpr (kFormat == StateFormat::dynamic4) load_32_u4(codes, number[0], number[1]);
  else load_32_u8(codes, number[0], number[1]);
  unroll<2>([&](auto half) __attribute__((always_inline)) {
    decoder(number[half], value[half], factor[half]);
    value[half] = first_lanes(value[half], count - 16 * half);
  });
}

template <StateFormat kFormat, bool kSigned>
LOWBIT_INLINE void store_group(uint8_t* codes, int64_t count, i32x16 a, i32x16 b) {
  constexpr int kOffset = StateCodes<kFormat, kSigned>::kOffset;
  uint8_t some[kGroup];
  uint8_t* const to = count < kGroup ? some : codes;
  if constexpr (kFormat == StateFormat::dynamic4) store_32_u4(to, a, b, kOffset);
  else store_32_u8(to, a, b, kOffset);
  if (count < kGroup)
    for (int64_t i = 0; i < state_bytes(kFormat, count); i++) codes[i] = some[i];
}

// Encodes a block of values with largest magnitude absmax; values exist up to a whole group. Not inlined: one copy for
// all rules.
template <StateFormat kFormat, bool kSigned>
void encode_values(float absmax, int64_t count, const float* values, uint8_t* codes) {
  const typename StateCodes<kFormat, kSigned>::Encoder encode(absmax);
  auto magnitude = [](f32x16 value) __attribute__((always_inline)) { return kSigned ? abs(value) : value; };
  if constexpr (StateCodes<kFormat, kSigned>::kIsDynamic) {
    // Two passes with the shifts in L1 between them, because the dependency chain, which bounds the speed, is then half
    // as long (AVX2, Zen 5: 1.13x of one pass).
    alignas(64) int32_t shifts[kMaxStateBlock];
    for (int64_t i = 0; i < count; i += kGroup)
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        const int64_t at = i + 16 * half;
        store_i32(shifts + at, encode.shift(magnitude(load(values + at))));
      });
    for (int64_t i = 0; i < count; i += kGroup) {
      i32x16 code[2];
      unroll<2>([&](auto half) __attribute__((always_inline)) {
        const int64_t at = i + 16 * half;
        const f32x16 value = load(values + at);
        code[half] = encode.code(value, magnitude(value), load_i32(shifts + at));
      });
      store_group<kFormat, kSigned>(codes + state_bytes(kFormat, i), count - i, code[0], code[1]);
    }
  } else {
    for (int64_t i = 0; i < count; i += kGroup)
      store_group<kFormat, kSigned>(codes + state_bytes(kFormat, i), count - i, encode(load(values + i)),
                                    encode(load(values + i + 16)));
  }
}

// Encodes a block of at most kMaxStateBlock values in multiples of `unit`, existing up to a whole group, and overwrites
// them. The scale comes from the bits of the largest |value|: as integers, nan and inf exceed all numbers, so neither
// can be lost. A block with nan or inf gets the scale nan and decodes to nan everywhere, never to invented finite
// values. A scale below 2^-126 has no inverse: such a block becomes zeros.
template <StateFormat kFormat, bool kSigned>
[[gnu::noinline]] void encode_block(const i32x16& absmax_bits, float unit, int64_t count, float* values, uint8_t* codes,
                                    float* scale) {  // one copy for all rules: six would be half of the code
  float absmax = float_from_bits(static_cast<uint32_t>(largest(absmax_bits)));
  *scale = absmax * unit / StateCodes<kFormat, kSigned>::kAbsmaxOverScale;
  if (!(*scale >= 0x1p-126f && absmax >= 0x1p-96f && absmax <= 0x1p96f)) [[unlikely]] {
    const bool finite = *scale < __builtin_inff(), zeros = !(finite && *scale >= 0x1p-126f);
    const float factor = zeros ? 0.0f : absmax < 1.0f ? 0x1p64f : 0x1p-64f;  // into the range of the encoders
    if (zeros) *scale = finite ? 0.0f : __builtin_nanf("");
    for (int64_t i = 0; i < count; i++) values[i] = zeros ? 0.0f : values[i] * factor;
    absmax = zeros ? 1.0f : absmax * factor;
  }
  encode_values<kFormat, kSigned>(absmax, count, values, codes);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
