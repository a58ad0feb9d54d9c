// SPDX-License-Identifier: Apache-2.0
// Floats to bfloat16 by the two-vector instruction, and tables of 32 numbers: for processors with AVX512_BF16.
#pragma once

#include "cpu/simd/avx512_lanes.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// 32 floats rounded to bfloat16 as by store_bf16, but subnormals to zero: two operations instead of nine for 16.
LOWBIT_INLINE void store_32_bf16(uint16_t* p, f32x16 a, f32x16 b) {
  __m512i rounded;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(a.v), "v"(b.v));
  _mm512_storeu_si512(p, rounded);
}
// Likewise, a and b interleaved: each lane has the bfloat16 of a, then of b.
LOWBIT_INLINE i32x16 bf16_pairs(f32x16 a, f32x16 b) {
  __m512i rounded;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(a.v), "v"(b.v));
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)),
                high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

// Looks up each half lane in 32 numbers by its lowest five bits.
LOWBIT_INLINE i32x16 lookup32_u16(const uint16_t* table, i32x16 index) {
  return {_mm512_permutexvar_epi16(index.v, _mm512_load_si512(table))};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
