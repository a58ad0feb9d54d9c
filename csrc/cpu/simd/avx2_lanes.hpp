// SPDX-License-Identifier: Apache-2.0
// The vector of 16 columns as two ymm, without integer products. Needs AVX2, FMA, F16C. Semantics: scalar.hpp.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.hpp"
#include "cpu/simd/transpose.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct f32x16 { __m256 lo, hi; };
struct i32x16 { __m256i lo, hi; };
struct u8x64 { __m256i lo, hi; };

LOWBIT_INLINE f32x16 set1(float a) { return {_mm256_set1_ps(a), _mm256_set1_ps(a)}; }
LOWBIT_INLINE f32x16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
LOWBIT_INLINE void store(float* p, f32x16 a) { _mm256_storeu_ps(p, a.lo), _mm256_storeu_ps(p + 8, a.hi); }
LOWBIT_INLINE f32x16 load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(load_xmm(p)), _mm256_cvtph_ps(load_xmm(p + 8))};
}
LOWBIT_INLINE f32x16 load_bf16(const uint16_t* p) {  // interleaved with zeros, which stays within lanes
  const __m256i h = _mm256_permute4x64_epi64(load_ymm(p), 0xd8), zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, h)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, h))};
}
LOWBIT_INLINE void store_f16(uint16_t* p, f32x16 a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(a.lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(a.hi, _MM_FROUND_TO_NEAREST_INT));
}
LOWBIT_INLINE __m256i round_to_bf16(__m256 a) {  // in the low half of each lane; not for nan
  const __m256i bits = _mm256_castps_si256(a),
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
}
LOWBIT_INLINE __m256i keep_nan(__m256i rounded, __m256 a) {
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(a), 16), _mm256_set1_epi32(0x40));
  return _mm256_blendv_epi8(rounded, quiet, _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
}
LOWBIT_INLINE void store_bf16(uint16_t* p, f32x16 a) {
  __m256i lo = round_to_bf16(a.lo), hi = round_to_bf16(a.hi);
  if (_mm256_movemask_ps(_mm256_cmp_ps(a.lo, a.hi, _CMP_UNORD_Q))) [[unlikely]]
    lo = keep_nan(lo, a.lo), hi = keep_nan(hi, a.hi);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packus_epi32(lo, hi), 0xd8));
}

LOWBIT_INLINE f32x16 add(f32x16 a, f32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 sub(f32x16 a, f32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 mul(f32x16 a, f32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 div(f32x16 a, f32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
LOWBIT_INLINE f32x16 max(f32x16 a, f32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 min(f32x16 a, f32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 abs(f32x16 a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
LOWBIT_INLINE f32x16 copysign(f32x16 a, f32x16 b) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(sign, a.lo), _mm256_and_ps(sign, b.lo)),
          _mm256_or_ps(_mm256_andnot_ps(sign, a.hi), _mm256_and_ps(sign, b.hi))};
}
LOWBIT_INLINE f32x16 to_float(i32x16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
LOWBIT_INLINE i32x16 to_int(f32x16 a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }
LOWBIT_INLINE f32x16 times_power_of_two(f32x16 a, i32x16 exponent) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_mul_ps(a.lo, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent.lo, bias), 23))),
          _mm256_mul_ps(a.hi, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent.hi, bias), 23)))};
}

LOWBIT_INLINE i32x16 set1(int32_t a) { return {_mm256_set1_epi32(a), _mm256_set1_epi32(a)}; }
LOWBIT_INLINE i32x16 add(i32x16 a, i32x16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
LOWBIT_INLINE f32x16 sqrt(f32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }

LOWBIT_INLINE i32x16 bits_of(f32x16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
LOWBIT_INLINE f32x16 float_of(i32x16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
LOWBIT_INLINE i32x16 sub(i32x16 a, i32x16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
LOWBIT_INLINE i32x16 mul(i32x16 a, i32x16 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
LOWBIT_INLINE i32x16 min(i32x16 a, i32x16 b) { return {_mm256_min_epi32(a.lo, b.lo), _mm256_min_epi32(a.hi, b.hi)}; }
LOWBIT_INLINE i32x16 max(i32x16 a, i32x16 b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
LOWBIT_INLINE i32x16 bit_and(i32x16 a, i32x16 b) {
  return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)};
}
LOWBIT_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
LOWBIT_INLINE i32x16 bit_xor(i32x16 a, i32x16 b) {
  return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
template <int count>
LOWBIT_INLINE i32x16 shift_left(i32x16 a) {
  return {_mm256_slli_epi32(a.lo, count), _mm256_slli_epi32(a.hi, count)};
}
template <int count>
LOWBIT_INLINE i32x16 shift_right(i32x16 a) {
  return {_mm256_srli_epi32(a.lo, count), _mm256_srli_epi32(a.hi, count)};
}
template <int count>
LOWBIT_INLINE i32x16 shift_right_signed(i32x16 a) {
  return {_mm256_srai_epi32(a.lo, count), _mm256_srai_epi32(a.hi, count)};
}
LOWBIT_INLINE bool all_bytes_have(i32x16 a, int bits) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(bits)), zero = _mm256_setzero_si256();
  const __m256i without = _mm256_or_si256(_mm256_cmpeq_epi8(_mm256_and_si256(a.lo, mask), zero),
                                          _mm256_cmpeq_epi8(_mm256_and_si256(a.hi, mask), zero));
  return _mm256_testz_si256(without, without);
}
LOWBIT_INLINE i32x16 shift_right(i32x16 a, i32x16 count) {
  return {_mm256_srlv_epi32(a.lo, count.lo), _mm256_srlv_epi32(a.hi, count.hi)};
}
LOWBIT_INLINE i32x16 at_least(f32x16 a, f32x16 b) {
  return {_mm256_castps_si256(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ))};
}
LOWBIT_INLINE bool all_at_most(f32x16 a, f32x16 b) {
  const __m256 above = _mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_NLE_UQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_NLE_UQ));
  return _mm256_movemask_ps(above) == 0;
}
LOWBIT_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) {
  return {_mm256_blendv_epi8(b.lo, a.lo, mask.lo), _mm256_blendv_epi8(b.hi, a.hi, mask.hi)};
}
LOWBIT_INLINE f32x16 lookup8(const float* table, i32x16 index) {
  const __m256 t = _mm256_load_ps(table);
  return {_mm256_permutevar8x32_ps(t, index.lo), _mm256_permutevar8x32_ps(t, index.hi)};
}
LOWBIT_INLINE __m256 lookup16(__m256 low, __m256 high, __m256i index) {  // bit 3 selects the half
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index),
                          _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
LOWBIT_INLINE f32x16 lookup16(const float* table, i32x16 index) {
  const __m256 low = _mm256_load_ps(table), high = _mm256_load_ps(table + 8);
  return {lookup16(low, high, index.lo), lookup16(low, high, index.hi)};
}
LOWBIT_INLINE i32x16 mul_high_u16(i32x16 a, i32x16 b) {
  return {_mm256_mulhi_epu16(a.lo, b.lo), _mm256_mulhi_epu16(a.hi, b.hi)};
}
LOWBIT_INLINE i32x16 sub_saturating_u16(i32x16 a, i32x16 b) {
  return {_mm256_subs_epu16(a.lo, b.lo), _mm256_subs_epu16(a.hi, b.hi)};
}
LOWBIT_INLINE i32x16 count_down_above(i32x16 n, f32x16 a, f32x16 b) {  // as integers: more ports than vcmpps
  return {_mm256_add_epi32(n.lo, _mm256_cmpgt_epi32(_mm256_castps_si256(a.lo), _mm256_castps_si256(b.lo))),
          _mm256_add_epi32(n.hi, _mm256_cmpgt_epi32(_mm256_castps_si256(a.hi), _mm256_castps_si256(b.hi)))};
}
LOWBIT_INLINE i32x16 max_u32(i32x16 a, i32x16 b) {
  return {_mm256_max_epu32(a.lo, b.lo), _mm256_max_epu32(a.hi, b.hi)};
}
LOWBIT_INLINE void store_ymm(void* p, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a); }
LOWBIT_INLINE void store_i32(int32_t* p, i32x16 a) { store_ymm(p, a.lo), store_ymm(p + 8, a.hi); }
LOWBIT_INLINE i32x16 negate_where_negative(i32x16 a, f32x16 b) {
  return {_mm256_sign_epi32(a.lo, _mm256_castps_si256(b.lo)), _mm256_sign_epi32(a.hi, _mm256_castps_si256(b.hi))};
}
LOWBIT_INLINE i32x16 load_i32(const int32_t* p) { return {load_ymm(p), load_ymm(p + 8)}; }
LOWBIT_INLINE i32x16 load_u8(const uint8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}
LOWBIT_INLINE int32_t largest(i32x16 a) {
  const __m256i s = _mm256_max_epi32(a.lo, a.hi);
  __m128i q = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_max_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
LOWBIT_INLINE void store_i8(int8_t* p, i32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
LOWBIT_INLINE __m128i to_u8(i32x16 a) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
LOWBIT_INLINE void store_u8(uint8_t* p, i32x16 a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_u8(a)); }
// Without a conversion: 0x4b0000cc is 2^23 + c. Unpacking, which stays within lanes, inserts the upper bytes, so the
// bytes are distributed before.
LOWBIT_INLINE void biased_float_of_bytes(__m256i bytes, f32x16& a, f32x16& b) {
  const __m256i dealt = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)),
                upper = _mm256_set1_epi16(0x4b00);
  const __m256i first = _mm256_unpacklo_epi8(dealt, _mm256_setzero_si256()),
                second = _mm256_unpackhi_epi8(dealt, _mm256_setzero_si256());
  a = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(first, upper)),
       _mm256_castsi256_ps(_mm256_unpackhi_epi16(first, upper))};
  b = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(second, upper)),
       _mm256_castsi256_ps(_mm256_unpackhi_epi16(second, upper))};
}
LOWBIT_INLINE void load_32_u8(const uint8_t* p, f32x16& a, f32x16& b) { biased_float_of_bytes(load_ymm(p), a, b); }
LOWBIT_INLINE void load_32_u4(const uint8_t* p, f32x16& a, f32x16& b) {
  const __m256i pairs = _mm256_cvtepu8_epi16(load_xmm(p));
  biased_float_of_bytes(_mm256_or_si256(_mm256_srli_epi16(pairs, 4),
                                        _mm256_slli_epi16(_mm256_and_si256(pairs, _mm256_set1_epi16(15)), 8)),
                        a, b);
}
LOWBIT_INLINE __m256i bytes_of(i32x16 a, i32x16 b, int offset) {
  const __m256i add = _mm256_set1_epi16(static_cast<int16_t>(offset));
  const __m256i first = _mm256_add_epi16(_mm256_packs_epi32(a.lo, a.hi), add),
                second = _mm256_add_epi16(_mm256_packs_epi32(b.lo, b.hi), add);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
LOWBIT_INLINE void store_32_u8(uint8_t* p, i32x16 a, i32x16 b, int offset) { store_ymm(p, bytes_of(a, b, offset)); }
LOWBIT_INLINE void store_32_u4(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  const __m256i pairs = _mm256_maddubs_epi16(bytes_of(a, b, offset), _mm256_set1_epi16(0x0110));  // first * 16 + second
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
LOWBIT_INLINE int32_t sum(i32x16 a) {
  const __m256i s = _mm256_add_epi32(a.lo, a.hi);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
LOWBIT_INLINE float sum(f32x16 a) { return sum(_mm256_add_ps(a.lo, a.hi)); }
LOWBIT_INLINE float largest(f32x16 a) {
  const __m256 s = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

struct i16x32 { __m256i lo, hi; };
LOWBIT_INLINE i16x32 load_i16(const int16_t* p) { return {load_ymm(p), load_ymm(p + 16)}; }
LOWBIT_INLINE i16x32 load_pair(const int16_t* p) {
  const __m256i pair = _mm256_castps_si256(_mm256_broadcast_ss(reinterpret_cast<const float*>(p)));
  return {pair, pair};
}
LOWBIT_INLINE void store_i16(int16_t* p, i32x16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8));
}
LOWBIT_INLINE i16x32 zip_bytes(__m128i a, __m128i b) {
  return {_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b))};
}
LOWBIT_INLINE i16x32 zip_i8(const int8_t* a, const int8_t* b) { return zip_bytes(load_xmm(a), load_xmm(b)); }
template <bool high>
LOWBIT_INLINE i16x32 zip_i4(const uint8_t* a, const uint8_t* b) {
  return zip_bytes(load_i4<high>(a), load_i4<high>(b));
}
LOWBIT_INLINE f32x16 in_register(f32x16 a) {
  asm("" : "+x"(a.lo), "+x"(a.hi));
  return a;
}
LOWBIT_INLINE i16x32 in_register(i16x32 a) {
  asm("" : "+x"(a.lo), "+x"(a.hi));
  return a;
}
struct Twice { f32x16 a, b; };
LOWBIT_INLINE Twice twice(__m256 a, __m256 b) { return {{a, a}, {b, b}}; }
LOWBIT_INLINE Twice twice(const float* p) { return twice(_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)); }
LOWBIT_INLINE Twice twice_f16(const uint16_t* p) {
  return twice(_mm256_cvtph_ps(load_xmm(p)), _mm256_cvtph_ps(load_xmm(p + 8)));
}
// Interleaving with zeros is half the work of widening and shifting, in another order.
LOWBIT_INLINE f32x16 load_bf16_unordered(const uint16_t* p) {
  const __m256i h = load_ymm(p), zero = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, h)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, h))};
}
LOWBIT_INLINE f32x16 ordered_bf16(f32x16 a) {
  return {_mm256_permute2f128_ps(a.lo, a.hi, 0x20), _mm256_permute2f128_ps(a.lo, a.hi, 0x31)};
}
LOWBIT_INLINE Twice twice_bf16(const uint16_t* p) {
  const f32x16 v = load_bf16_unordered(p);
  return twice(v.lo, v.hi);
}
LOWBIT_INLINE i16x32 twice_i8(const int8_t* p) {
  const __m256i w = _mm256_cvtepi8_epi16(load_xmm(p));
  return {w, w};
}
struct TwiceCodes { i16x32 low, high; };
LOWBIT_INLINE TwiceCodes twice_i4(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi16(load_xmm(p)), eight = _mm256_set1_epi16(8);
  const __m256i low = _mm256_sub_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(15)), eight),
                high = _mm256_sub_epi16(_mm256_srli_epi16(bytes, 4), eight);
  return {{low, low}, {high, high}};
}
LOWBIT_INLINE f32x8 half_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const __m256 first = sums_in_lanes(a.lo, b.lo, c.lo, d.lo), second = sums_in_lanes(a.hi, b.hi, c.hi, d.hi);
  return {_mm256_add_ps(_mm256_permute2f128_ps(first, second, 0x20), _mm256_permute2f128_ps(first, second, 0x31))};
}
LOWBIT_INLINE f32x8 half_sums(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
  const __m256i first = sums_in_lanes(a.lo, b.lo, c.lo, d.lo), second = sums_in_lanes(a.hi, b.hi, c.hi, d.hi);
  return {_mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_permute2x128_si256(first, second, 0x20),
                                              _mm256_permute2x128_si256(first, second, 0x31)))};
}

LOWBIT_INLINE u8x64 load_codes(const uint8_t* p) { return {load_ymm(p), load_ymm(p + 32)}; }
LOWBIT_INLINE i32x16 words_of(u8x64 c) { return {c.lo, c.hi}; }
LOWBIT_INLINE u8x64 lookup16(const uint8_t* table, u8x64 codes) {
  const __m256i all = _mm256_broadcastsi128_si256(load_xmm(table));
  return {_mm256_shuffle_epi8(all, codes.lo), _mm256_shuffle_epi8(all, codes.hi)};
}
template <int at>
LOWBIT_INLINE __m256
int8_value(__m256i codes) {  // xor makes bytes signed; then shift the byte to the top and down
  const __m256i s = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
  return _mm256_cvtepi32_ps(_mm256_srai_epi32(at == 3 ? s : _mm256_slli_epi32(s, 24 - 8 * at), 24));
}
template <int at>
LOWBIT_INLINE f32x16 int8_value(u8x64 c) { return {int8_value<at>(c.lo), int8_value<at>(c.hi)}; }

template <int at>  // position in a pair of bfloat16 in one lane
LOWBIT_INLINE f32x16 bf16_pair_value(u8x64 c) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000));
  return at ? f32x16{_mm256_castsi256_ps(_mm256_and_si256(c.lo, high)),
                     _mm256_castsi256_ps(_mm256_and_si256(c.hi, high))}
            : f32x16{_mm256_castsi256_ps(_mm256_slli_epi32(c.lo, 16)),
                     _mm256_castsi256_ps(_mm256_slli_epi32(c.hi, 16))};
}

// A nibble is converted in place, as n * 2^(4 at), and the activation carries 2^(-4 at): one shift less per value. The
// topmost would be negative.
constexpr int int4_shift(int at) { return at == 7 ? 0 : 4 * at; }
template <int at>
LOWBIT_INLINE __m256 int4_value(__m256i codes) {
  return _mm256_cvtepi32_ps(at == 7 ? _mm256_srli_epi32(codes, 28)
                                    : _mm256_and_si256(codes, _mm256_set1_epi32(15 << (at == 7 ? 0 : 4 * at))));
}
template <int at>
LOWBIT_INLINE f32x16 int4_value(u8x64 c) { return {int4_value<at>(c.lo), int4_value<at>(c.hi)}; }

struct NibbleCodes {
  using Codes = u8x64;
  LOWBIT_INLINE static Codes low(u8x64 c) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(c.lo, mask), _mm256_and_si256(c.hi, mask)};
  }
  LOWBIT_INLINE static Codes high(u8x64 c) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(_mm256_srli_epi16(c.lo, 4), mask), _mm256_and_si256(_mm256_srli_epi16(c.hi, 4), mask)};
  }
};

// Register tiles: of 16 registers, 6 rows take 12 as accumulators.
constexpr int kFloatRows = 6, kFloatPanels = 1, kStreamRows = 4;
constexpr bool kStreamFour = true;  // prefetch int4 with float activations as four streams: panel.hpp

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
