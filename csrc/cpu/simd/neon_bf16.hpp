// SPDX-License-Identifier: Apache-2.0
// NEON with bfmmla (bf16, Armv8.6 and later): 16 products of bfloat16, of two rows by two columns, are added into
// float32, rounded to odd. Subnormal factors and sums count as zero. Everything else is from neon_dot.
#pragma once

#include "cpu/simd/neon_dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

using TileSum = float;
LOWBIT_INLINE int32x4_t add_matrix(int32x4_t sums, int8x16_t x, int8x16_t w) {
  return vreinterpretq_s32_f32(
      vbfmmlaq_f32(vreinterpretq_f32_s32(sums), vreinterpretq_bf16_s8(x), vreinterpretq_bf16_s8(w)));
}

// Looks up each half lane in 32 numbers by its lowest five bits.
LOWBIT_INLINE int32x4_t looked_up(int32x4_t index, uint8x16x4_t table) {
  const uint16x8_t number = vandq_u16(vreinterpretq_u16_s32(index), vdupq_n_u16(31));
  const uint16x8_t bytes = vmlaq_u16(vdupq_n_u16(0x100), number, vdupq_n_u16(0x202));  // 2 i and 2 i + 1
  return vreinterpretq_s32_u8(vqtbl4q_u8(table, vreinterpretq_u8_u16(bytes)));
}
LOWBIT_INLINE i32x16 lookup32_u16(const uint16_t* table, i32x16 index) {
  const uint8x16x4_t bytes = vld1q_u8_x4(reinterpret_cast<const uint8_t*>(table));
  return LOWBIT_EACH(looked_up, index, bytes);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/neon_tiles.hpp"
#include "cpu/simd/vector.hpp"
