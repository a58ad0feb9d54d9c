// SPDX-License-Identifier: Apache-2.0
// The vector of 16 columns as four registers of 128 bits, without products of bytes. Needs what every 64-bit Arm has:
// NEON with conversions of float16. Semantics: scalar.hpp.
#pragma once

#include <arm_neon.h>

#include <cstdint>

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct f32x16 { float32x4_t q[4]; };
struct i32x16 { int32x4_t q[4]; };
struct u8x64 { uint8x16_t q[4]; };
struct i16x32 { int16x8_t q[4]; };
struct f32x8 { float32x4_t q[2]; };

// f of each register; of the registers of two and of three vectors.
#define LOWBIT_EACH(f, a, ...)                                                                                  \
  {{f((a).q[0] __VA_OPT__(, ) __VA_ARGS__), f((a).q[1] __VA_OPT__(, ) __VA_ARGS__),                             \
    f((a).q[2] __VA_OPT__(, ) __VA_ARGS__), f((a).q[3] __VA_OPT__(, ) __VA_ARGS__)}}
#define LOWBIT_EACH_TWO(f, a, b) \
  {{f((a).q[0], (b).q[0]), f((a).q[1], (b).q[1]), f((a).q[2], (b).q[2]), f((a).q[3], (b).q[3])}}
#define LOWBIT_EACH_THREE(f, a, b, c)                                           \
  {{f((a).q[0], (b).q[0], (c).q[0]), f((a).q[1], (b).q[1], (c).q[1]),           \
    f((a).q[2], (b).q[2], (c).q[2]), f((a).q[3], (b).q[3], (c).q[3])}}

LOWBIT_INLINE f32x16 set1(float a) {
  const float32x4_t q = vdupq_n_f32(a);
  return {{q, q, q, q}};
}
LOWBIT_INLINE i32x16 set1(int32_t a) {
  const int32x4_t q = vdupq_n_s32(a);
  return {{q, q, q, q}};
}
LOWBIT_INLINE f32x16 load(const float* p) {
  return {{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}
LOWBIT_INLINE void store(float* p, f32x16 a) {
  vst1q_f32(p, a.q[0]), vst1q_f32(p + 4, a.q[1]), vst1q_f32(p + 8, a.q[2]), vst1q_f32(p + 12, a.q[3]);
}

LOWBIT_INLINE f32x16 add(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(vaddq_f32, a, b); }
LOWBIT_INLINE f32x16 sub(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(vsubq_f32, a, b); }
LOWBIT_INLINE f32x16 mul(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(vmulq_f32, a, b); }
LOWBIT_INLINE f32x16 div(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(vdivq_f32, a, b); }
LOWBIT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return LOWBIT_EACH_THREE(vfmaq_f32, c, a, b); }
LOWBIT_INLINE f32x16 sqrt(f32x16 a) { return LOWBIT_EACH(vsqrtq_f32, a); }
LOWBIT_INLINE f32x16 abs(f32x16 a) { return LOWBIT_EACH(vabsq_f32, a); }
LOWBIT_INLINE float32x4_t larger_of(float32x4_t a, float32x4_t b) {  // b if either is nan, where vmaxq_f32 gives nan
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
LOWBIT_INLINE float32x4_t smaller_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
LOWBIT_INLINE f32x16 max(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(larger_of, a, b); }
LOWBIT_INLINE f32x16 min(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(smaller_of, a, b); }
LOWBIT_INLINE float32x4_t with_sign_of(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vdupq_n_u32(0x80000000u), b, a);
}
LOWBIT_INLINE f32x16 copysign(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(with_sign_of, a, b); }
LOWBIT_INLINE f32x16 to_float(i32x16 a) { return LOWBIT_EACH(vcvtq_f32_s32, a); }
LOWBIT_INLINE int32x4_t nearest(float32x4_t a) {  // the conversion saturates, and makes 0 of nan
  return vbslq_s32(vcltq_f32(a, vdupq_n_f32(0x1p31f)), vcvtnq_s32_f32(a), vdupq_n_s32(INT32_MIN));
}
LOWBIT_INLINE i32x16 to_int(f32x16 a) { return LOWBIT_EACH(nearest, a); }
LOWBIT_INLINE float32x4_t times_power(float32x4_t a, int32x4_t exponent) {
  return vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23)));
}
LOWBIT_INLINE f32x16 times_power_of_two(f32x16 a, i32x16 exponent) { return LOWBIT_EACH_TWO(times_power, a, exponent); }

LOWBIT_INLINE i32x16 bits_of(f32x16 a) { return LOWBIT_EACH(vreinterpretq_s32_f32, a); }
LOWBIT_INLINE f32x16 float_of(i32x16 a) { return LOWBIT_EACH(vreinterpretq_f32_s32, a); }
LOWBIT_INLINE i32x16 add(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vaddq_s32, a, b); }
LOWBIT_INLINE i32x16 sub(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vsubq_s32, a, b); }
LOWBIT_INLINE i32x16 mul(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vmulq_s32, a, b); }
LOWBIT_INLINE i32x16 min(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vminq_s32, a, b); }
LOWBIT_INLINE i32x16 max(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vmaxq_s32, a, b); }
LOWBIT_INLINE i32x16 bit_and(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vandq_s32, a, b); }
LOWBIT_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(vorrq_s32, a, b); }
LOWBIT_INLINE i32x16 bit_xor(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(veorq_s32, a, b); }
template <int count>
LOWBIT_INLINE i32x16 shift_left(i32x16 a) {
  return LOWBIT_EACH(vshlq_n_s32, a, count);
}
// A shift to the right has no immediate 0.
template <int count>
LOWBIT_INLINE int32x4_t shifted_right(int32x4_t a) {
  if constexpr (count == 0) return a;
  else return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), count));
}
template <int count>
LOWBIT_INLINE i32x16 shift_right(i32x16 a) {
  return LOWBIT_EACH(shifted_right<count>, a);
}
template <int count>
LOWBIT_INLINE i32x16 shift_right_signed(i32x16 a) {
  if constexpr (count == 0) return a;
  else return LOWBIT_EACH(vshrq_n_s32, a, count);
}
LOWBIT_INLINE int32x4_t shifted_right_by(int32x4_t a, int32x4_t count) {  // vshlq looks at the lowest byte of a count
  const uint32x4_t most = vminq_u32(vreinterpretq_u32_s32(count), vdupq_n_u32(32));
  return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(a), vnegq_s32(vreinterpretq_s32_u32(most))));
}
LOWBIT_INLINE i32x16 shift_right(i32x16 a, i32x16 count) { return LOWBIT_EACH_TWO(shifted_right_by, a, count); }
LOWBIT_INLINE bool all_set(uint32x4_t a, uint32x4_t b, uint32x4_t c, uint32x4_t d) {  // masks
  return vminvq_u32(vandq_u32(vandq_u32(a, b), vandq_u32(c, d))) == 0xffffffffu;
}
LOWBIT_INLINE uint32x4_t bytes_with(int32x4_t a, uint8x16_t bits) {
  return vreinterpretq_u32_u8(vtstq_u8(vreinterpretq_u8_s32(a), bits));
}
LOWBIT_INLINE bool all_bytes_have(i32x16 a, int bits) {
  const uint8x16_t all = vdupq_n_u8(static_cast<uint8_t>(bits));
  return all_set(bytes_with(a.q[0], all), bytes_with(a.q[1], all), bytes_with(a.q[2], all), bytes_with(a.q[3], all));
}
LOWBIT_INLINE int32x4_t mask_at_least(float32x4_t a, float32x4_t b) { return vreinterpretq_s32_u32(vcgeq_f32(a, b)); }
LOWBIT_INLINE i32x16 at_least(f32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(mask_at_least, a, b); }
LOWBIT_INLINE bool all_at_most(f32x16 a, f32x16 b) {
  return all_set(vcleq_f32(a.q[0], b.q[0]), vcleq_f32(a.q[1], b.q[1]), vcleq_f32(a.q[2], b.q[2]),
                 vcleq_f32(a.q[3], b.q[3]));
}
LOWBIT_INLINE int32x4_t selected(int32x4_t mask, int32x4_t a, int32x4_t b) {
  return vbslq_s32(vreinterpretq_u32_s32(mask), a, b);
}
LOWBIT_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) { return LOWBIT_EACH_THREE(selected, mask, a, b); }
LOWBIT_INLINE int32x4_t product_of_upper(int32x4_t a, int32x4_t b) {
  const uint32x4_t product =
      vmulq_u32(vshrq_n_u32(vreinterpretq_u32_s32(a), 16), vshrq_n_u32(vreinterpretq_u32_s32(b), 16));
  return vreinterpretq_s32_u32(vandq_u32(product, vdupq_n_u32(0xffff0000u)));
}
LOWBIT_INLINE i32x16 mul_high_u16(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(product_of_upper, a, b); }
LOWBIT_INLINE int32x4_t difference_or_0(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_u16(vqsubq_u16(vreinterpretq_u16_s32(a), vreinterpretq_u16_s32(b)));
}
LOWBIT_INLINE i32x16 sub_saturating_u16(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(difference_or_0, a, b); }
LOWBIT_INLINE int32x4_t less_one_above(int32x4_t n, float32x4_t a, float32x4_t b) {
  return vaddq_s32(n, vreinterpretq_s32_u32(vcgtq_f32(a, b)));
}
LOWBIT_INLINE i32x16 count_down_above(i32x16 n, f32x16 a, f32x16 b) { return LOWBIT_EACH_THREE(less_one_above, n, a, b); }
LOWBIT_INLINE int32x4_t larger_u32(int32x4_t a, int32x4_t b) {
  return vreinterpretq_s32_u32(vmaxq_u32(vreinterpretq_u32_s32(a), vreinterpretq_u32_s32(b)));
}
LOWBIT_INLINE i32x16 max_u32(i32x16 a, i32x16 b) { return LOWBIT_EACH_TWO(larger_u32, a, b); }
LOWBIT_INLINE int32x4_t negated_where(int32x4_t a, float32x4_t b) {
  const int32x4_t sign = vshrq_n_s32(vreinterpretq_s32_f32(b), 31);
  return vsubq_s32(veorq_s32(a, sign), sign);
}
LOWBIT_INLINE i32x16 negate_where_negative(i32x16 a, f32x16 b) { return LOWBIT_EACH_TWO(negated_where, a, b); }
LOWBIT_INLINE int32_t sum(i32x16 a) {
  return vaddvq_s32(vaddq_s32(vaddq_s32(a.q[0], a.q[1]), vaddq_s32(a.q[2], a.q[3])));
}
LOWBIT_INLINE int32_t largest(i32x16 a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.q[0], a.q[1]), vmaxq_s32(a.q[2], a.q[3])));
}
LOWBIT_INLINE float sum(f32x16 a) {
  const float32x4_t four = vaddq_f32(vaddq_f32(a.q[0], a.q[2]), vaddq_f32(a.q[1], a.q[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(vpadd_f32(two, two), 0);
}
LOWBIT_INLINE float largest(f32x16 a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.q[0], a.q[1]), vmaxq_f32(a.q[2], a.q[3])));
}
LOWBIT_INLINE f32x16 in_register(f32x16 a) {
  asm("" : "+w"(a.q[0]), "+w"(a.q[1]), "+w"(a.q[2]), "+w"(a.q[3]));
  return a;
}
LOWBIT_INLINE i16x32 in_register(i16x32 a) {
  asm("" : "+w"(a.q[0]), "+w"(a.q[1]), "+w"(a.q[2]), "+w"(a.q[3]));
  return a;
}

// A table of 16 or 64 bytes per register: lane i's bytes are those from 4 * index[i] on.
LOWBIT_INLINE uint8x16_t bytes_at(int32x4_t index, uint32_t bits) {
  const uint32x4_t low = vandq_u32(vreinterpretq_u32_s32(index), vdupq_n_u32(bits));
  return vreinterpretq_u8_u32(vmlaq_u32(vdupq_n_u32(0x03020100), low, vdupq_n_u32(0x04040404)));
}
LOWBIT_INLINE float32x4_t looked_up(uint8x16x2_t table, int32x4_t index) {
  return vreinterpretq_f32_u8(vqtbl2q_u8(table, bytes_at(index, 7)));
}
LOWBIT_INLINE float32x4_t looked_up(uint8x16x4_t table, int32x4_t index) {
  return vreinterpretq_f32_u8(vqtbl4q_u8(table, bytes_at(index, 15)));
}
LOWBIT_INLINE f32x16 lookup8(const float* table, i32x16 index) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(table);
  const uint8x16x2_t t = {{vld1q_u8(p), vld1q_u8(p + 16)}};
  return {{looked_up(t, index.q[0]), looked_up(t, index.q[1]), looked_up(t, index.q[2]), looked_up(t, index.q[3])}};
}
LOWBIT_INLINE f32x16 lookup16(const float* table, i32x16 index) {
  const uint8_t* p = reinterpret_cast<const uint8_t*>(table);
  const uint8x16x4_t t = {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
  return {{looked_up(t, index.q[0]), looked_up(t, index.q[1]), looked_up(t, index.q[2]), looked_up(t, index.q[3])}};
}

LOWBIT_INLINE u8x64 load_codes(const uint8_t* p) {
  return {{vld1q_u8(p), vld1q_u8(p + 16), vld1q_u8(p + 32), vld1q_u8(p + 48)}};
}
LOWBIT_INLINE i32x16 words_of(u8x64 c) { return LOWBIT_EACH(vreinterpretq_s32_u8, c); }
LOWBIT_INLINE u8x64 lookup16(const uint8_t* table, u8x64 codes) {
  const uint8x16_t all = vld1q_u8(table);
  return {{vqtbl1q_u8(all, codes.q[0]), vqtbl1q_u8(all, codes.q[1]), vqtbl1q_u8(all, codes.q[2]),
           vqtbl1q_u8(all, codes.q[3])}};
}
LOWBIT_INLINE int8x16_t from_128(uint8x16_t codes) {  // as signed numbers, which count from 0
  return vreinterpretq_s8_u8(veorq_u8(codes, vdupq_n_u8(0x80)));
}
// A conversion divides by a power of two in the same instruction: a code is converted at the top of its lane or where
// it is, and not shifted down.
template <int at>
LOWBIT_INLINE float32x4_t byte_value(uint8x16_t codes) {
  const int32x4_t s = vreinterpretq_s32_s8(from_128(codes));
  if constexpr (at == 0) return vcvtq_n_f32_s32(vshlq_n_s32(s, 24), 24);
  else if constexpr (at == 3) return vcvtq_f32_s32(vshrq_n_s32(s, 24));
  else return vcvtq_f32_s32(vshrq_n_s32(vshlq_n_s32(s, 24 - 8 * at), 24));
}
template <int at>
LOWBIT_INLINE f32x16 int8_value(u8x64 c) {
  return LOWBIT_EACH(byte_value<at>, c);
}
template <int at>  // position in a pair of bfloat16 in one lane
LOWBIT_INLINE float32x4_t half_of_pair(uint8x16_t pairs) {
  const uint32x4_t words = vreinterpretq_u32_u8(pairs);
  return vreinterpretq_f32_u32(at ? vandq_u32(words, vdupq_n_u32(0xffff0000u)) : vshlq_n_u32(words, 16));
}
template <int at>
LOWBIT_INLINE f32x16 bf16_pair_value(u8x64 c) {
  return LOWBIT_EACH(half_of_pair<at>, c);
}
constexpr int int4_shift(int) { return 0; }
template <int at>
LOWBIT_INLINE float32x4_t nibble_value(uint8x16_t codes) {
  const uint32x4_t there = vandq_u32(vreinterpretq_u32_u8(codes), vdupq_n_u32(15u << 4 * at));
  if constexpr (at == 0) return vcvtq_f32_u32(there);
  else return vcvtq_n_f32_u32(there, 4 * at);
}
template <int at>
LOWBIT_INLINE f32x16 int4_value(u8x64 c) {
  return LOWBIT_EACH(nibble_value<at>, c);
}

struct NibbleCodes {
  using Codes = u8x64;
  LOWBIT_INLINE static Codes low(u8x64 c) { return LOWBIT_EACH(vandq_u8, c, vdupq_n_u8(15)); }
  LOWBIT_INLINE static Codes high(u8x64 c) { return LOWBIT_EACH(vshrq_n_u8, c, 4); }
};
// Register tiles: of 32 registers, 6 rows take 24 as accumulators.
constexpr int kFloatRows = 6, kFloatPanels = 1, kStreamRows = 4;
constexpr bool kStreamFour = false;  // prefetch int4 with float activations as four streams: panel.hpp

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
