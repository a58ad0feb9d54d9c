// SPDX-License-Identifier: Apache-2.0
// Code shared by AVX2 and AVX-512, in ymm and xmm: loads; sums of lanes; to[j][i] = from[i][j] of 16 x 16 floats (two
// unpacks and a permute per vector of 8).
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE __m256i load_ymm(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
LOWBIT_INLINE __m128i load_xmm(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
template <bool high>
LOWBIT_INLINE __m128i load_i4(const uint8_t* p) {  // the low or high nibbles of 16 bytes, - 8
  const __m128i bytes = high ? _mm_srli_epi16(load_xmm(p), 4) : load_xmm(p);
  return _mm_sub_epi8(_mm_and_si128(bytes, _mm_set1_epi8(15)), _mm_set1_epi8(8));
}
LOWBIT_INLINE float sum(__m256 a) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}

LOWBIT_INLINE void transpose_8x8(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  __m256 half[8], quarter[8];  // rows i and i + 4 share a register, so that no lane is crossed later
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const float* row = from + i % 4 * from_stride + i / 4 * 4;
    half[i] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(row)), _mm_loadu_ps(row + 4 * from_stride), 1);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    quarter[i] = _mm256_unpacklo_ps(half[i], half[i + 1]);
    quarter[i + 1] = _mm256_unpackhi_ps(half[i], half[i + 1]);
    quarter[i + 2] = _mm256_unpacklo_ps(half[i + 2], half[i + 3]);
    quarter[i + 3] = _mm256_unpackhi_ps(half[i + 2], half[i + 3]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    _mm256_storeu_ps(to + i * to_stride, _mm256_shuffle_ps(quarter[i], quarter[i + 2], 0x44));
    _mm256_storeu_ps(to + (i + 1) * to_stride, _mm256_shuffle_ps(quarter[i], quarter[i + 2], 0xee));
    _mm256_storeu_ps(to + (i + 2) * to_stride, _mm256_shuffle_ps(quarter[i + 1], quarter[i + 3], 0x44));
    _mm256_storeu_ps(to + (i + 3) * to_stride, _mm256_shuffle_ps(quarter[i + 1], quarter[i + 3], 0xee));
  }
}

struct f32x8 { __m256 v; };
LOWBIT_INLINE f32x8 load8(const float* p) { return {_mm256_loadu_ps(p)}; }
LOWBIT_INLINE f32x8 repeat_two(const float* p) {
  return {_mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)))};
}
LOWBIT_INLINE f32x8 repeat_four(const float* p) { return {_mm256_broadcast_ps(reinterpret_cast<const __m128*>(p))}; }
LOWBIT_INLINE f32x8 mul(f32x8 a, f32x8 b) { return {_mm256_mul_ps(a.v, b.v)}; }
LOWBIT_INLINE __m256 sums_in_lanes(__m256 a, __m256 b, __m256 c, __m256 d) {  // in each 128 bits: [a b c d]
  const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)),
               cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  return _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
}
LOWBIT_INLINE __m256i sums_in_lanes(__m256i a, __m256i b, __m256i c, __m256i d) {
  const __m256i ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)),
                cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  return _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
}
LOWBIT_INLINE void store_two_rows(float* to, int64_t stride, f32x8 a) {
  _mm_storeu_ps(to, _mm256_castps256_ps128(a.v)), _mm_storeu_ps(to + stride, _mm256_extractf128_ps(a.v, 1));
}
LOWBIT_INLINE void store_four_rows(float* to, int64_t stride, f32x8 a) {
  const __m128 first = _mm256_castps256_ps128(a.v), second = _mm256_extractf128_ps(a.v, 1);
  auto at = [&](int64_t row) { return reinterpret_cast<__m64*>(to + row * stride); };
  _mm_storel_pi(at(0), first), _mm_storeh_pi(at(1), first), _mm_storel_pi(at(2), second), _mm_storeh_pi(at(3), second);
}

LOWBIT_INLINE void transpose_16x16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int i = 0; i < 16; i += 8)
    for (int j = 0; j < 16; j += 8)
      transpose_8x8(from + i * from_stride + j, from_stride, to + j * to_stride + i, to_stride);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
