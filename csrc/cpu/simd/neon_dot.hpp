// SPDX-License-Identifier: Apache-2.0
// NEON with sdot (Armv8.2 and later): four products of int8 are added into int32.
#pragma once

#define LOWBIT_SERVED_BY neon  // for everything but integer products
#include "cpu/simd/neon_memory.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int8x8_t four_activations(const int8_t* a) {  // sdot has one of its factors from a part of a register
  return vreinterpret_s8_s32(int32x2_t{*reinterpret_cast<const int32_t*>(a), 0});
}

struct Dot4 : NibbleCodes {
  using Acc = i32x16;
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 0;
  LOWBIT_INLINE static int32x4_t add_products(int32x4_t sum, uint8x16_t codes, int8x8_t x) {
    return vdotq_lane_s32(sum, vreinterpretq_s8_u8(codes), x, 0);
  }
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    const int8x8_t x = four_activations(a);
    return {{add_products(acc.q[0], c.q[0], x), add_products(acc.q[1], c.q[1], x), add_products(acc.q[2], c.q[2], x),
             add_products(acc.q[3], c.q[3], x)}};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

struct Dot8 {
  struct Codes { int8x16_t q[4]; };
  using Acc = i32x16;
  using Step = int8_t;
  static constexpr int kChains = 1;
  static constexpr int kOffset = 0, kInt16 = 0;
  LOWBIT_INLINE static Codes codes(u8x64 c) { return LOWBIT_EACH(from_128, c); }
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    const int8x8_t x = four_activations(a);
    return {{vdotq_lane_s32(acc.q[0], c.q[0], x, 0), vdotq_lane_s32(acc.q[1], c.q[1], x, 0),
             vdotq_lane_s32(acc.q[2], c.q[2], x, 0), vdotq_lane_s32(acc.q[3], c.q[3], x, 0)}};
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 0, kInt16 = 0;
  LOWBIT_INLINE static int32x4_t add_products(int32x4_t sum, uint8x16_t codes, int32x4_t places, int8x16_t x) {
    return vdotq_s32(sum, vreinterpretq_s8_u8(codes), vqtbl1q_s8(x, vreinterpretq_u8_s32(places)));
  }
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    const int8x16_t x = vcombine_s8(vld1_s8(a), vld1_s8(a));
    return {{add_products(sum.q[0], codes.q[0], places.q[0], x), add_products(sum.q[1], codes.q[1], places.q[1], x),
             add_products(sum.q[2], codes.q[2], places.q[2], x), add_products(sum.q[3], codes.q[3], places.q[3], x)}};
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64) { return sum; }
};

constexpr int kDotRows = 6, kDotPanels = 1;  // 24 accumulators, 4 codes and a broadcast in 32 registers

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
