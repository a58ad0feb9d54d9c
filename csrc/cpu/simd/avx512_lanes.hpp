// SPDX-License-Identifier: Apache-2.0
// The vector of 16 columns as one zmm, without integer products. Needs AVX-512 F, BW, DQ, VL. Semantics: scalar.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/simd/transpose.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct f32x16 { __m512 v; };
struct i32x16 { __m512i v; };
struct u8x64 { __m512i v; };

LOWBIT_INLINE f32x16 set1(float a) { return {_mm512_set1_ps(a)}; }
LOWBIT_INLINE f32x16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
LOWBIT_INLINE void store(float* p, f32x16 a) { _mm512_storeu_ps(p, a.v); }
LOWBIT_INLINE f32x16 load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(load_ymm(p))}; }
LOWBIT_INLINE f32x16 load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_ymm(p)), 16))};
}
LOWBIT_INLINE void store_f16(uint16_t* p, f32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
LOWBIT_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v),
                odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded =
      _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)));
}

LOWBIT_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
LOWBIT_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
LOWBIT_INLINE f32x16 abs(f32x16 a) { return {_mm512_abs_ps(a.v)}; }
LOWBIT_INLINE f32x16 copysign(f32x16 a, f32x16 b) {
  const __m512 sign = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(sign, a.v), _mm512_and_ps(sign, b.v))};
}
LOWBIT_INLINE f32x16 to_float(i32x16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
LOWBIT_INLINE i32x16 to_int(f32x16 a) { return {_mm512_cvtps_epi32(a.v)}; }
LOWBIT_INLINE f32x16 times_power_of_two(f32x16 a, i32x16 exponent) {
  const __m512i power = _mm512_slli_epi32(_mm512_add_epi32(exponent.v, _mm512_set1_epi32(127)), 23);
  return {_mm512_mul_ps(a.v, _mm512_castsi512_ps(power))};
}

LOWBIT_INLINE i32x16 set1(int32_t a) { return {_mm512_set1_epi32(a)}; }
LOWBIT_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
LOWBIT_INLINE f32x16 sqrt(f32x16 a) { return {_mm512_sqrt_ps(a.v)}; }

LOWBIT_INLINE i32x16 bits_of(f32x16 a) { return {_mm512_castps_si512(a.v)}; }
LOWBIT_INLINE f32x16 float_of(i32x16 a) { return {_mm512_castsi512_ps(a.v)}; }
LOWBIT_INLINE i32x16 sub(i32x16 a, i32x16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
LOWBIT_INLINE i32x16 mul(i32x16 a, i32x16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
LOWBIT_INLINE i32x16 min(i32x16 a, i32x16 b) { return {_mm512_min_epi32(a.v, b.v)}; }
LOWBIT_INLINE i32x16 max(i32x16 a, i32x16 b) { return {_mm512_max_epi32(a.v, b.v)}; }
LOWBIT_INLINE i32x16 bit_and(i32x16 a, i32x16 b) { return {_mm512_and_si512(a.v, b.v)}; }
LOWBIT_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm512_or_si512(a.v, b.v)}; }
LOWBIT_INLINE i32x16 bit_xor(i32x16 a, i32x16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
template <int count> LOWBIT_INLINE i32x16 shift_left(i32x16 a) { return {_mm512_slli_epi32(a.v, count)}; }
template <int count> LOWBIT_INLINE i32x16 shift_right(i32x16 a) { return {_mm512_srli_epi32(a.v, count)}; }
template <int count> LOWBIT_INLINE i32x16 shift_right_signed(i32x16 a) { return {_mm512_srai_epi32(a.v, count)}; }
LOWBIT_INLINE bool all_bytes_have(i32x16 a, int bits) {
  return _mm512_testn_epi8_mask(a.v, _mm512_set1_epi8(static_cast<char>(bits))) == 0;
}
LOWBIT_INLINE i32x16 shift_right(i32x16 a, i32x16 count) { return {_mm512_srlv_epi32(a.v, count.v)}; }
LOWBIT_INLINE i32x16 at_least(f32x16 a, f32x16 b) {
  return {_mm512_movm_epi32(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ))};
}
LOWBIT_INLINE bool all_at_most(f32x16 a, f32x16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_NLE_UQ) == 0; }
LOWBIT_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) {
  return {_mm512_mask_mov_epi32(b.v, _mm512_movepi32_mask(mask.v), a.v)};
}
LOWBIT_INLINE f32x16 lookup8(const float* table, i32x16 index) {
  return {_mm512_permutexvar_ps(index.v, _mm512_load_ps(table))};
}
LOWBIT_INLINE f32x16 lookup16(const float* table, i32x16 index) { return lookup8(table, index); }
LOWBIT_INLINE i32x16 mul_high_u16(i32x16 a, i32x16 b) { return {_mm512_mulhi_epu16(a.v, b.v)}; }
LOWBIT_INLINE i32x16 sub_saturating_u16(i32x16 a, i32x16 b) { return {_mm512_subs_epu16(a.v, b.v)}; }
LOWBIT_INLINE i32x16 count_down_above(i32x16 n, f32x16 a, f32x16 b) {
  return {_mm512_mask_sub_epi32(n.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), n.v, _mm512_set1_epi32(1))};
}
LOWBIT_INLINE i32x16 max_u32(i32x16 a, i32x16 b) { return {_mm512_max_epu32(a.v, b.v)}; }
LOWBIT_INLINE void store_i32(int32_t* p, i32x16 a) { _mm512_storeu_si512(p, a.v); }
LOWBIT_INLINE i32x16 negate_where_negative(i32x16 a, f32x16 b) {
  return {_mm512_mask_sub_epi32(a.v, _mm512_movepi32_mask(_mm512_castps_si512(b.v)), _mm512_setzero_si512(), a.v)};
}
LOWBIT_INLINE i32x16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
LOWBIT_INLINE i32x16 load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
LOWBIT_INLINE f32x16 biased_float_of_bytes(__m128i bytes) {
  return {_mm512_castsi512_ps(_mm512_or_si512(_mm512_cvtepu8_epi32(bytes), _mm512_set1_epi32(0x4b000000)))};
}
LOWBIT_INLINE void load_32_u8(const uint8_t* p, f32x16& a, f32x16& b) {
  a = biased_float_of_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
  b = biased_float_of_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
}
LOWBIT_INLINE void load_32_u4(const uint8_t* p, f32x16& a, f32x16& b) {
  const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i codes = _mm256_or_si256(_mm256_srli_epi16(pairs, 4),
                                        _mm256_slli_epi16(_mm256_and_si256(pairs, _mm256_set1_epi16(15)), 8));
  a = biased_float_of_bytes(_mm256_castsi256_si128(codes)),
  b = biased_float_of_bytes(_mm256_extracti128_si256(codes, 1));
}
LOWBIT_INLINE __m256i bytes_of(i32x16 a, i32x16 b, int offset) {
  const __m512i words = _mm512_add_epi16(_mm512_packs_epi32(a.v, b.v), _mm512_set1_epi16(static_cast<int16_t>(offset)));
  const __m256i bytes = _mm256_packus_epi16(_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1));
  return _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7));
}
LOWBIT_INLINE void store_32_u8(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bytes_of(a, b, offset));
}
LOWBIT_INLINE void store_32_u4(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  const __m256i pairs = _mm256_maddubs_epi16(bytes_of(a, b, offset), _mm256_set1_epi16(0x0110));  // first * 16 + second
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtepi16_epi8(pairs));
}
LOWBIT_INLINE int32_t largest(i32x16 a) { return _mm512_reduce_max_epi32(a.v); }
LOWBIT_INLINE void store_i8(int8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
LOWBIT_INLINE void store_u8(uint8_t* p, i32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm512_cvtusepi32_epi8(_mm512_max_epi32(a.v, _mm512_setzero_si512())));
}
LOWBIT_INLINE int32_t sum(i32x16 a) { return _mm512_reduce_add_epi32(a.v); }
LOWBIT_INLINE float sum(f32x16 a) {
  return sum(_mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1)));
}
LOWBIT_INLINE float largest(f32x16 a) { return _mm512_reduce_max_ps(a.v); }

struct i16x32 { __m512i v; };
LOWBIT_INLINE i16x32 load_i16(const int16_t* p) { return {_mm512_loadu_si512(p)}; }
LOWBIT_INLINE i16x32 load_pair(const int16_t* p) {
  return {_mm512_castps_si512(_mm512_set1_ps(*reinterpret_cast<const float*>(p)))};
}
LOWBIT_INLINE void store_i16(int16_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(a.v));
}
LOWBIT_INLINE i16x32 zip_bytes(__m128i a, __m128i b) {
  return {_mm512_cvtepi8_epi16(_mm256_set_m128i(_mm_unpackhi_epi8(a, b), _mm_unpacklo_epi8(a, b)))};
}
LOWBIT_INLINE i16x32 zip_i8(const int8_t* a, const int8_t* b) { return zip_bytes(load_xmm(a), load_xmm(b)); }
template <bool high>
LOWBIT_INLINE i16x32 zip_i4(const uint8_t* a, const uint8_t* b) {
  return zip_bytes(load_i4<high>(a), load_i4<high>(b));
}
LOWBIT_INLINE f32x16 in_register(f32x16 a) {
  asm("" : "+v"(a.v));
  return a;
}
LOWBIT_INLINE i16x32 in_register(i16x32 a) {
  asm("" : "+v"(a.v));
  return a;
}
struct Twice { f32x16 a, b; };
LOWBIT_INLINE __m256i xmm_twice(const void* p) { return _mm256_broadcastsi128_si256(load_xmm(p)); }
LOWBIT_INLINE Twice twice(const float* p) {
  return {{_mm512_broadcast_f32x8(_mm256_loadu_ps(p))}, {_mm512_broadcast_f32x8(_mm256_loadu_ps(p + 8))}};
}
LOWBIT_INLINE Twice twice_f16(const uint16_t* p) {
  return {{_mm512_cvtph_ps(xmm_twice(p))}, {_mm512_cvtph_ps(xmm_twice(p + 8))}};
}
LOWBIT_INLINE Twice twice_bf16(const uint16_t* p) {
  const __m512i h = _mm512_broadcast_i64x4(load_ymm(p)), zero = _mm512_setzero_si512();
  return {{_mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, h))}, {_mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, h))}};
}
LOWBIT_INLINE f32x16 load_bf16_unordered(const uint16_t* p) { return load_bf16(p); }
LOWBIT_INLINE f32x16 ordered_bf16(f32x16 a) { return a; }
LOWBIT_INLINE i16x32 twice_i8(const int8_t* p) { return {_mm512_cvtepi8_epi16(xmm_twice(p))}; }
struct TwiceCodes { i16x32 low, high; };
LOWBIT_INLINE TwiceCodes twice_i4(const uint8_t* p) {
  const __m512i bytes = _mm512_cvtepu8_epi16(xmm_twice(p)), eight = _mm512_set1_epi16(8);
  return {{_mm512_sub_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(15)), eight)},
          {_mm512_sub_epi16(_mm512_srli_epi16(bytes, 4), eight)}};
}
LOWBIT_INLINE f32x8 half_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpackhi_ps(a.v, b.v)),
               cd = _mm512_add_ps(_mm512_unpacklo_ps(c.v, d.v), _mm512_unpackhi_ps(c.v, d.v));
  const __m512 s = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  const __m256 first = _mm512_castps512_ps256(s), second = _mm512_extractf32x8_ps(s, 1);
  return {_mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31))};
}
LOWBIT_INLINE f32x8 half_sums(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
  const __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a.v, b.v), _mm512_unpackhi_epi32(a.v, b.v)),
                cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c.v, d.v), _mm512_unpackhi_epi32(c.v, d.v));
  const __m512i s = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i first = _mm512_castsi512_si256(s), second = _mm512_extracti32x8_epi32(s, 1);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                                              _mm256_permute2x128_si256(first, second, 0x31)))};
}

// In two halves: streams of codes arrive up to 1.25x faster than by whole lines (W4A8, m = 1, Zen 5), and codes in L1
// as fast.
LOWBIT_INLINE u8x64 load_codes(const uint8_t* p) {
  const __m256i lo = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                hi = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32));
  return {_mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1)};
}
LOWBIT_INLINE i32x16 words_of(u8x64 c) { return {c.v}; }
LOWBIT_INLINE u8x64 lookup16(const uint8_t* table, u8x64 codes) {
  const __m128i entries = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), codes.v)};
}
template <int at>
LOWBIT_INLINE f32x16 int8_value(u8x64 c) {
  const __m512i s = _mm512_xor_si512(c.v, _mm512_set1_epi8(-128));
  return {_mm512_cvtepi32_ps(_mm512_srai_epi32(at == 3 ? s : _mm512_slli_epi32(s, 24 - 8 * at), 24))};
}
template <int at>
LOWBIT_INLINE f32x16 bf16_pair_value(u8x64 c) {
  return {_mm512_castsi512_ps(at ? _mm512_and_si512(c.v, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000)))
                                 : _mm512_slli_epi32(c.v, 16))};
}
// The permutation reads only the low four bits of each lane, so one shift and one table look-up give a float.
constexpr int int4_shift(int) { return 0; }
template <int at>
LOWBIT_INLINE f32x16 int4_value(u8x64 c) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(at == 0 ? c.v : _mm512_srli_epi32(c.v, 4 * at), table)};
}

struct NibbleCodes {
  using Codes = u8x64;
  LOWBIT_INLINE static Codes low(u8x64 c) { return {_mm512_and_si512(c.v, _mm512_set1_epi8(15))}; }
  LOWBIT_INLINE static Codes high(u8x64 c) {
    return {_mm512_and_si512(_mm512_srli_epi16(c.v, 4), _mm512_set1_epi8(15))};
  }
};

// Register tiles: of 32 registers. Two panels share each broadcast activation.
constexpr int kDotRows = 6, kDotPanels = 2, kFloatRows = 12, kFloatPanels = 2, kStreamRows = 8;
constexpr bool kStreamFour = false;  // prefetch int4 with float activations as four streams: panel.hpp

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
