// SPDX-License-Identifier: Apache-2.0
// AVX-512 without VNNI: integer products by maddubs and madd, as in avx2.hpp.
#pragma once

#include "cpu/simd/avx512_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) {
  return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(a.v, b.v))};
}

// Eight maddubs results are added in int16; int8 x int8 is widened to int16.
struct Dot4 : NibbleCodes {
  struct Acc { __m512i v; };  // accumulators in int16
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 2;
  LOWBIT_INLINE static Acc start(i32x16) { return {_mm512_setzero_si512()}; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    return {
        _mm512_add_epi16(acc.v, _mm512_maddubs_epi16(c.v, _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(a))))};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16 total, Acc acc) {
    return {_mm512_add_epi32(total.v, _mm512_madd_epi16(acc.v, _mm512_set1_epi16(1)))};
  }
};

struct Dot8 {
  static constexpr int kOffset = 0;
  struct Codes { __m512i even, odd; };
  using Acc = i32x16;
  using Step = int16_t;  // in the order k 0, 2, 1, 3
  static constexpr int kChains = 1;
  LOWBIT_INLINE static Codes codes(u8x64 c) {
    const __m512i s = _mm512_xor_si512(c.v, _mm512_set1_epi8(-128));
    return {_mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8), _mm512_srai_epi16(s, 8)};
  }
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int16_t* a) {
    const int32_t* pair = reinterpret_cast<const int32_t*>(a);
    acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(c.even, _mm512_set1_epi32(pair[0])));
    acc.v = _mm512_add_epi32(acc.v, _mm512_madd_epi16(c.odd, _mm512_set1_epi32(pair[1])));
    return acc;
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

// |code| * (x with the sign of the code): a pair is at most 2 * 128 * 127, which fits int16.
struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 0;
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const __m512i all = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)));
    const __m512i x = _mm512_shuffle_epi8(all, places.v);
    const __m512i with_sign = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(codes.v), _mm512_setzero_si512(), x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(codes.v), with_sign);
    return {_mm512_add_epi32(sum.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64) { return sum; }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
