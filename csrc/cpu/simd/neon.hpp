// SPDX-License-Identifier: Apache-2.0
// NEON of Armv8.0, which has no product of four bytes: bytes are multiplied to int16 and added there or in pairs.
#pragma once

#include "cpu/simd/neon_memory.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int8x16_t four_activations(const int8_t* a) {  // in each column
  return vreinterpretq_s8_s32(vld1q_dup_s32(reinterpret_cast<const int32_t*>(a)));
}
// Sums of the four k of a column, which are neighbours in two registers.
LOWBIT_INLINE int32x4_t sums_of_columns(int32x4_t a, int32x4_t b) { return vpaddq_s32(a, b); }
LOWBIT_INLINE int32x4_t sums_of_columns(int16x8_t a, int16x8_t b) { return vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)); }

// Sums with the products of four activations: two registers for each of the codes, of its lower and of its upper half.
template <class Dot, class Acc, class Codes>
LOWBIT_INLINE Acc with_products(const Acc& sums, const Codes& c, int8x16_t x) {
  return {{Dot::lower(sums.q[0], c.q[0], x), Dot::upper(sums.q[1], c.q[0], x), Dot::lower(sums.q[2], c.q[1], x),
           Dot::upper(sums.q[3], c.q[1], x), Dot::lower(sums.q[4], c.q[2], x), Dot::upper(sums.q[5], c.q[2], x),
           Dot::lower(sums.q[6], c.q[3], x), Dot::upper(sums.q[7], c.q[3], x)}};
}
// Each k of each column has a sum of its own in int16: 8 steps of 15 * 127 are 15240 < 32767, exact.
struct Dot4 : NibbleCodes {
  struct Acc { int16x8_t q[8]; };
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 1;
  LOWBIT_INLINE static int16x8_t lower(int16x8_t sum, uint8x16_t codes, int8x16_t x) {
    return vmlal_s8(sum, vget_low_s8(vreinterpretq_s8_u8(codes)), vget_low_s8(x));
  }
  LOWBIT_INLINE static int16x8_t upper(int16x8_t sum, uint8x16_t codes, int8x16_t x) {
    return vmlal_high_s8(sum, vreinterpretq_s8_u8(codes), x);
  }
  LOWBIT_INLINE static Acc start(i32x16) { return {}; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    return with_products<Dot4>(acc, c, four_activations(a));
  }
  LOWBIT_INLINE static i32x16 finish(i32x16 total, Acc acc) {
    const i32x16 sums = {{sums_of_columns(acc.q[0], acc.q[1]), sums_of_columns(acc.q[2], acc.q[3]),
                          sums_of_columns(acc.q[4], acc.q[5]), sums_of_columns(acc.q[6], acc.q[7])}};
    return add(total, sums);
  }
};

// A product of int8 has 15 bits: two of them are added to a sum in int32.
struct Dot8 {
  struct Codes { int8x16_t q[4]; };
  struct Acc { int32x4_t q[8]; };
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0;
  LOWBIT_INLINE static Codes codes(u8x64 c) { return LOWBIT_EACH(from_128, c); }
  LOWBIT_INLINE static int32x4_t lower(int32x4_t sum, int8x16_t codes, int8x16_t x) {
    return vpadalq_s16(sum, vmull_s8(vget_low_s8(codes), vget_low_s8(x)));
  }
  LOWBIT_INLINE static int32x4_t upper(int32x4_t sum, int8x16_t codes, int8x16_t x) {
    return vpadalq_s16(sum, vmull_high_s8(codes, x));
  }
  LOWBIT_INLINE static Acc start(i32x16) { return {}; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    return with_products<Dot8>(acc, c, four_activations(a));
  }
  LOWBIT_INLINE static i32x16 finish(i32x16 total, Acc acc) {
    const i32x16 sums = {{sums_of_columns(acc.q[0], acc.q[1]), sums_of_columns(acc.q[2], acc.q[3]),
                          sums_of_columns(acc.q[4], acc.q[5]), sums_of_columns(acc.q[6], acc.q[7])}};
    return add(total, sums);
  }
};

struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 0;
  LOWBIT_INLINE static int32x4_t products(uint8x16_t codes, int32x4_t places, int8x16_t x) {
    const int8x16_t c = vreinterpretq_s8_u8(codes), chosen = vqtbl1q_s8(x, vreinterpretq_u8_s32(places));
    return sums_of_columns(vmull_s8(vget_low_s8(c), vget_low_s8(chosen)), vmull_high_s8(c, chosen));
  }
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const int8x16_t x = vcombine_s8(vld1_s8(a), vld1_s8(a));
    const i32x16 sums = {{products(codes.q[0], places.q[0], x), products(codes.q[1], places.q[1], x),
                          products(codes.q[2], places.q[2], x), products(codes.q[3], places.q[3], x)}};
    return add(sum, sums);
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64) { return sum; }
};

constexpr int kDotRows = 3, kDotPanels = 1;  // 24 accumulators, 4 codes and a broadcast in 32 registers

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
