// SPDX-License-Identifier: Apache-2.0
// AVX2 with VNNI: vpdpbusd and vpdpwssd on 256 bits multiply and add into int32 without saturation.
#pragma once

#define LOWBIT_SERVED_BY avx2  // for everything but integer products
#include "cpu/simd/avx2_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) {
  return {_mm256_dpwssd_avx_epi32(sum.lo, a.lo, b.lo), _mm256_dpwssd_avx_epi32(sum.hi, a.hi, b.hi)};
}

struct Dot4 : NibbleCodes {
  using Acc = i32x16;
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 0;
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    const __m256i b = _mm256_set1_epi32(*reinterpret_cast<const int32_t*>(a));
    return {_mm256_dpbusd_avx_epi32(acc.lo, c.lo, b), _mm256_dpbusd_avx_epi32(acc.hi, c.hi, b)};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

struct Dot8 : Dot4 {
  static constexpr int kOffset = 128;  // codes stay unsigned: accumulators start at -128 * sum of the activations
  LOWBIT_INLINE static Codes codes(u8x64 c) { return c; }
};

struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 128;
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const __m256i x = _mm256_broadcastq_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(a)));
    return {_mm256_dpbusd_avx_epi32(sum.lo, _mm256_shuffle_epi8(x, places.lo), codes.lo),
            _mm256_dpbusd_avx_epi32(sum.hi, _mm256_shuffle_epi8(x, places.hi), codes.hi)};
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64 codes) {
    const __m256i all = _mm256_set1_epi8(static_cast<char>(kOffset));
    return {_mm256_dpbusd_avx_epi32(sum.lo, all, codes.lo), _mm256_dpbusd_avx_epi32(sum.hi, all, codes.hi)};
  }
};

// 12 accumulators, 2 codes and a broadcast in 16 registers. vpdpbusd has a latency of 5 cycles and a throughput
// of two per cycle: with 8 accumulators W8A8 took 1.25 times as long at m = 32, W4A8 in groups of 128 1.15
// times (Sapphire Rapids).
constexpr int kDotRows = 6, kDotPanels = 1;

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
