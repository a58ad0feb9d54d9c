// SPDX-License-Identifier: Apache-2.0
// AVX2: integer products by maddubs and madd.
#pragma once

#include "cpu/simd/avx2_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) {
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(a.lo, b.lo)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(a.hi, b.hi))};
}

// Eight maddubs results are added in int16 before one madd: 8 * 2 * 15 * 127 = 30480 < 32767, exact.
struct Dot4 : NibbleCodes {
  struct Acc { __m256i lo, hi; };  // accumulators in int16
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 2;
  LOWBIT_INLINE static Acc start(i32x16) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    const __m256i b = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(a));
    return {_mm256_add_epi16(acc.lo, _mm256_maddubs_epi16(c.lo, b)),
            _mm256_add_epi16(acc.hi, _mm256_maddubs_epi16(c.hi, b))};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16 total, Acc acc) {
    const __m256i ones = _mm256_set1_epi16(1);
    return {_mm256_add_epi32(total.lo, _mm256_madd_epi16(acc.lo, ones)),
            _mm256_add_epi32(total.hi, _mm256_madd_epi16(acc.hi, ones))};
  }
};

// int8 x int8 has no exact byte product here (u8 x s8 saturates), so both sides are widened to int16: k 0,2 and k 1,3
// of each column as pairs. 4 uops for 32 products, as many as the sign trick, with two fewer on the multiplier ports.
struct Dot8 {
  static constexpr int kOffset = 0;
  struct Codes { __m256i even_lo, even_hi, odd_lo, odd_hi; };
  using Acc = i32x16;
  using Step = int16_t;  // in the order k 0, 2, 1, 3
  static constexpr int kChains = 1;
  LOWBIT_INLINE static Codes codes(u8x64 c) {
    const __m256i flip = _mm256_set1_epi8(-128);
    const __m256i lo = _mm256_xor_si256(c.lo, flip), hi = _mm256_xor_si256(c.hi, flip);
    return {_mm256_srai_epi16(_mm256_slli_epi16(lo, 8), 8), _mm256_srai_epi16(_mm256_slli_epi16(hi, 8), 8),
            _mm256_srai_epi16(lo, 8), _mm256_srai_epi16(hi, 8)};
  }
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int16_t* a) {
    const __m256i even = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(a)[0]),
                  odd = _mm256_set1_epi32(reinterpret_cast<const int32_t*>(a)[1]);
    acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(c.even_lo, even));
    acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(c.even_hi, even));
    acc.lo = _mm256_add_epi32(acc.lo, _mm256_madd_epi16(c.odd_lo, odd));
    acc.hi = _mm256_add_epi32(acc.hi, _mm256_madd_epi16(c.odd_hi, odd));
    return acc;
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

// |code| * (x with the sign of the code): a pair is at most 2 * 128 * 127, which fits int16.
struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 0;
  LOWBIT_INLINE static __m256i products(__m256i codes, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const __m256i x = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)));
    return {_mm256_add_epi32(sum.lo, products(codes.lo, _mm256_shuffle_epi8(x, places.lo))),
            _mm256_add_epi32(sum.hi, products(codes.hi, _mm256_shuffle_epi8(x, places.hi)))};
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64) { return sum; }
};

constexpr int kDotRows = 4, kDotPanels = 1;  // 8 int16 accumulators, 2 codes and a broadcast in 16 registers

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
