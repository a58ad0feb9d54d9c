// SPDX-License-Identifier: Apache-2.0
// NEON: vectors of other widths than 32 bits in memory, pairs of int16, halves of vectors, the transposition of 16 x 16
// floats. Semantics: scalar.hpp.
#pragma once

#include "cpu/simd/neon_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE float32x4_t four_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
LOWBIT_INLINE float32x4_t four_bf16(const uint16_t* p) {
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p)), 16));
}
LOWBIT_INLINE f32x16 load_f16(const uint16_t* p) {
  return {{four_f16(p), four_f16(p + 4), four_f16(p + 8), four_f16(p + 12)}};
}
LOWBIT_INLINE f32x16 load_bf16(const uint16_t* p) {
  return {{four_bf16(p), four_bf16(p + 4), four_bf16(p + 8), four_bf16(p + 12)}};
}
LOWBIT_INLINE uint16x4_t to_f16(float32x4_t a) { return vreinterpret_u16_f16(vcvt_f16_f32(a)); }
LOWBIT_INLINE uint16x4_t to_bf16(float32x4_t a) {
  const uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint16x4_t rounded = vaddhn_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff))),
                   quiet = vorr_u16(vshrn_n_u32(bits, 16), vdup_n_u16(0x40));
  return vbsl_u16(vmovn_u32(vceqq_f32(a, a)), rounded, quiet);
}
LOWBIT_INLINE void store_f16(uint16_t* p, f32x16 a) {
  vst1_u16(p, to_f16(a.q[0])), vst1_u16(p + 4, to_f16(a.q[1]));
  vst1_u16(p + 8, to_f16(a.q[2])), vst1_u16(p + 12, to_f16(a.q[3]));
}
LOWBIT_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  vst1_u16(p, to_bf16(a.q[0])), vst1_u16(p + 4, to_bf16(a.q[1]));
  vst1_u16(p + 8, to_bf16(a.q[2])), vst1_u16(p + 12, to_bf16(a.q[3]));
}
LOWBIT_INLINE f32x16 load_bf16_unordered(const uint16_t* p) { return load_bf16(p); }
LOWBIT_INLINE f32x16 ordered_bf16(f32x16 a) { return a; }

LOWBIT_INLINE i32x16 load_i32(const int32_t* p) {
  return {{vld1q_s32(p), vld1q_s32(p + 4), vld1q_s32(p + 8), vld1q_s32(p + 12)}};
}
LOWBIT_INLINE void store_i32(int32_t* p, i32x16 a) {
  vst1q_s32(p, a.q[0]), vst1q_s32(p + 4, a.q[1]), vst1q_s32(p + 8, a.q[2]), vst1q_s32(p + 12, a.q[3]);
}
// 16 bytes as 32-bit lanes, with `upper` above each: 0, or 0x4b00 for the floats 2^23 + byte.
LOWBIT_INLINE i32x16 widened(uint8x16_t bytes, uint16_t upper) {
  const uint8x16_t zero = vdupq_n_u8(0);
  const uint16x8_t low = vreinterpretq_u16_u8(vzip1q_u8(bytes, zero)), high = vreinterpretq_u16_u8(vzip2q_u8(bytes, zero)),
                   above = vdupq_n_u16(upper);
  return {{vreinterpretq_s32_u16(vzip1q_u16(low, above)), vreinterpretq_s32_u16(vzip2q_u16(low, above)),
           vreinterpretq_s32_u16(vzip1q_u16(high, above)), vreinterpretq_s32_u16(vzip2q_u16(high, above))}};
}
LOWBIT_INLINE i32x16 load_u8(const uint8_t* p) { return widened(vld1q_u8(p), 0); }
LOWBIT_INLINE void load_32_u8(const uint8_t* p, f32x16& a, f32x16& b) {
  a = float_of(widened(vld1q_u8(p), 0x4b00)), b = float_of(widened(vld1q_u8(p + 16), 0x4b00));
}
LOWBIT_INLINE void load_32_u4(const uint8_t* p, f32x16& a, f32x16& b) {
  const uint8x16_t bytes = vld1q_u8(p), first = vshrq_n_u8(bytes, 4), second = vandq_u8(bytes, vdupq_n_u8(15));
  a = float_of(widened(vzip1q_u8(first, second), 0x4b00)), b = float_of(widened(vzip2q_u8(first, second), 0x4b00));
}
LOWBIT_INLINE int16x8_t narrowed(int32x4_t a, int32x4_t b) { return vqmovn_high_s32(vqmovn_s32(a), b); }
LOWBIT_INLINE uint8x16_t bytes_of(i32x16 a, int16_t offset) {  // saturated
  const int16x8_t add = vdupq_n_s16(offset);
  return vqmovun_high_s16(vqmovun_s16(vaddq_s16(narrowed(a.q[0], a.q[1]), add)),
                          vaddq_s16(narrowed(a.q[2], a.q[3]), add));
}
LOWBIT_INLINE void store_i8(int8_t* p, i32x16 a) {
  vst1q_s8(p, vqmovn_high_s16(vqmovn_s16(narrowed(a.q[0], a.q[1])), narrowed(a.q[2], a.q[3])));
}
LOWBIT_INLINE void store_i16(int16_t* p, i32x16 a) {
  vst1q_s16(p, narrowed(a.q[0], a.q[1])), vst1q_s16(p + 8, narrowed(a.q[2], a.q[3]));
}
LOWBIT_INLINE void store_u8(uint8_t* p, i32x16 a) { vst1q_u8(p, bytes_of(a, 0)); }
LOWBIT_INLINE void store_32_u8(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  vst1q_u8(p, bytes_of(a, static_cast<int16_t>(offset))), vst1q_u8(p + 16, bytes_of(b, static_cast<int16_t>(offset)));
}
LOWBIT_INLINE void store_32_u4(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  const uint8x16_t low = bytes_of(a, static_cast<int16_t>(offset)), high = bytes_of(b, static_cast<int16_t>(offset));
  vst1q_u8(p, vsliq_n_u8(vuzp2q_u8(low, high), vuzp1q_u8(low, high), 4));  // the first of two above the second
}

LOWBIT_INLINE i16x32 load_i16(const int16_t* p) {
  return {{vld1q_s16(p), vld1q_s16(p + 8), vld1q_s16(p + 16), vld1q_s16(p + 24)}};
}
LOWBIT_INLINE i16x32 load_pair(const int16_t* p) {
  const int16x8_t pair = vreinterpretq_s16_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(p)));
  return {{pair, pair, pair, pair}};
}
LOWBIT_INLINE int16x8_t low_half(int8x16_t a) { return vmovl_s8(vget_low_s8(a)); }
LOWBIT_INLINE int16x8_t high_half(int8x16_t a) { return vmovl_high_s8(a); }
LOWBIT_INLINE i16x32 zip_bytes(int8x16_t a, int8x16_t b) {
  const int8x16_t first = vzip1q_s8(a, b), second = vzip2q_s8(a, b);
  return {{low_half(first), high_half(first), low_half(second), high_half(second)}};
}
LOWBIT_INLINE i16x32 zip_i8(const int8_t* a, const int8_t* b) { return zip_bytes(vld1q_s8(a), vld1q_s8(b)); }
template <bool high>
LOWBIT_INLINE int8x16_t load_i4(const uint8_t* p) {  // the low or high nibbles of 16 bytes, - 8
  const uint8x16_t bytes = vld1q_u8(p), nibbles = high ? vshrq_n_u8(bytes, 4) : vandq_u8(bytes, vdupq_n_u8(15));
  return vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8));
}
template <bool high>
LOWBIT_INLINE i16x32 zip_i4(const uint8_t* a, const uint8_t* b) {
  return zip_bytes(load_i4<high>(a), load_i4<high>(b));
}
LOWBIT_INLINE int32x4_t sums_of_pairs(int16x8_t a, int16x8_t b) {
  return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
}
LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) {
  const i32x16 pairs = LOWBIT_EACH_TWO(sums_of_pairs, a, b);
  return add(sum, pairs);
}

struct Twice { f32x16 a, b; };
LOWBIT_INLINE Twice twice(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {
  return {{{a, b, a, b}}, {{c, d, c, d}}};
}
LOWBIT_INLINE Twice twice(const float* p) {
  return twice(vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12));
}
LOWBIT_INLINE Twice twice_f16(const uint16_t* p) {
  return twice(four_f16(p), four_f16(p + 4), four_f16(p + 8), four_f16(p + 12));
}
LOWBIT_INLINE Twice twice_bf16(const uint16_t* p) {
  return twice(four_bf16(p), four_bf16(p + 8), four_bf16(p + 4), four_bf16(p + 12));
}
LOWBIT_INLINE i16x32 bytes_twice(int8x16_t a) {
  const int16x8_t low = low_half(a), high = high_half(a);
  return {{low, high, low, high}};
}
LOWBIT_INLINE i16x32 twice_i8(const int8_t* p) { return bytes_twice(vld1q_s8(p)); }
struct TwiceCodes { i16x32 low, high; };
LOWBIT_INLINE TwiceCodes twice_i4(const uint8_t* p) {
  return {bytes_twice(load_i4<false>(p)), bytes_twice(load_i4<true>(p))};
}

LOWBIT_INLINE f32x8 load8(const float* p) { return {{vld1q_f32(p), vld1q_f32(p + 4)}}; }
LOWBIT_INLINE f32x8 repeat_two(const float* p) {
  const float32x4_t two = vcombine_f32(vld1_f32(p), vld1_f32(p));
  return {{two, two}};
}
LOWBIT_INLINE f32x8 repeat_four(const float* p) { return {{vld1q_f32(p), vld1q_f32(p)}}; }
LOWBIT_INLINE f32x8 mul(f32x8 a, f32x8 b) { return {{vmulq_f32(a.q[0], b.q[0]), vmulq_f32(a.q[1], b.q[1])}}; }
// [a b] of the lower and of the upper halves of two registers.
LOWBIT_INLINE float32x4_t lower_halves(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip1q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
LOWBIT_INLINE float32x4_t upper_halves(float32x4_t a, float32x4_t b) {
  return vreinterpretq_f32_f64(vzip2q_f64(vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b)));
}
LOWBIT_INLINE float32x4_t sums_of_four(float32x4_t a, float32x4_t b, float32x4_t c, float32x4_t d) {  // [a b c d]
  const float32x4_t ab = vaddq_f32(vzip1q_f32(a, b), vzip2q_f32(a, b)), cd = vaddq_f32(vzip1q_f32(c, d), vzip2q_f32(c, d));
  return vaddq_f32(lower_halves(ab, cd), upper_halves(ab, cd));
}
LOWBIT_INLINE int32x4_t sums_of_four(int32x4_t a, int32x4_t b, int32x4_t c, int32x4_t d) {
  return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
}
LOWBIT_INLINE f32x8 half_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  return {{vaddq_f32(sums_of_four(a.q[0], b.q[0], c.q[0], d.q[0]), sums_of_four(a.q[1], b.q[1], c.q[1], d.q[1])),
           vaddq_f32(sums_of_four(a.q[2], b.q[2], c.q[2], d.q[2]), sums_of_four(a.q[3], b.q[3], c.q[3], d.q[3]))}};
}
LOWBIT_INLINE f32x8 half_sums(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
  const int32x4_t first = vaddq_s32(sums_of_four(a.q[0], b.q[0], c.q[0], d.q[0]),
                                    sums_of_four(a.q[1], b.q[1], c.q[1], d.q[1])),
                  second = vaddq_s32(sums_of_four(a.q[2], b.q[2], c.q[2], d.q[2]),
                                     sums_of_four(a.q[3], b.q[3], c.q[3], d.q[3]));
  return {{vcvtq_f32_s32(first), vcvtq_f32_s32(second)}};
}
LOWBIT_INLINE void store_two_rows(float* to, int64_t stride, f32x8 a) {
  vst1q_f32(to, a.q[0]), vst1q_f32(to + stride, a.q[1]);
}
LOWBIT_INLINE void store_four_rows(float* to, int64_t stride, f32x8 a) {
  vst1_f32(to, vget_low_f32(a.q[0])), vst1_f32(to + stride, vget_high_f32(a.q[0]));
  vst1_f32(to + 2 * stride, vget_low_f32(a.q[1])), vst1_f32(to + 3 * stride, vget_high_f32(a.q[1]));
}

LOWBIT_INLINE void transpose_4x4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + from_stride), c = vld1q_f32(from + 2 * from_stride),
                    d = vld1q_f32(from + 3 * from_stride);
  const float32x4_t ab = vtrn1q_f32(a, b), ba = vtrn2q_f32(a, b), cd = vtrn1q_f32(c, d), dc = vtrn2q_f32(c, d);
  vst1q_f32(to, lower_halves(ab, cd)), vst1q_f32(to + to_stride, lower_halves(ba, dc));
  vst1q_f32(to + 2 * to_stride, upper_halves(ab, cd)), vst1q_f32(to + 3 * to_stride, upper_halves(ba, dc));
}
LOWBIT_INLINE void transpose_16x16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 16; j += 4)
      transpose_4x4(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
