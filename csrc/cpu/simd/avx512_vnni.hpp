// SPDX-License-Identifier: Apache-2.0
// AVX-512 with VNNI: vpdpbusd multiplies unsigned codes by signed activations and adds into int32 without saturation.
#pragma once

#define LOWBIT_SERVED_BY avx512  // for everything but integer products
#include "cpu/simd/avx512_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) { return {_mm512_dpwssd_epi32(sum.v, a.v, b.v)}; }

struct Dot4 : NibbleCodes {
  using Acc = i32x16;
  using Step = int8_t;
  static constexpr int kChains = 4;  // vpdpbusd has a latency of 4 to 5 cycles
  static constexpr int kOffset = 0, kInt16 = 0;
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    return {_mm512_dpbusd_epi32(acc.v, c.v, _mm512_set1_epi32(*reinterpret_cast<const int32_t*>(a)))};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

struct Dot8 : Dot4 {
  static constexpr int kOffset = 128;
  LOWBIT_INLINE static Codes codes(u8x64 c) { return c; }
};

struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 128;
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const __m512i x = _mm512_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)));
    return {_mm512_dpbusd_epi32(sum.v, _mm512_shuffle_epi8(x, places.v), codes.v)};
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64 codes) {
    return {_mm512_dpbusd_epi32(sum.v, _mm512_set1_epi8(static_cast<char>(kOffset)), codes.v)};
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
