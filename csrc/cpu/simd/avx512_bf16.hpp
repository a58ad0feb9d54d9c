// SPDX-License-Identifier: Apache-2.0
// AVX-512 BF16 where vdpbf16ps takes as long as an FMA (AMD from Zen 4 on): 32 products of bfloat16 in place of 16 of
// float32. The loops are those of the tile unit (amx.hpp), which is here 16 rows of 16 sums in registers for the time
// of a product. Everything else is that of avx512_vnni.
#pragma once

#include <type_traits>

#include "cpu/loops.hpp"
#include "cpu/simd/avx512_vnni.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The tiles of this thread while one lives, with the meaning of those of amx.hpp: 0 to 3 hold sums; 4 to 7 are where
// the rows of activations and weights lie, which a product reads there.
class TileUnit {
 public:
  static constexpr int64_t kRows = 16;
  static constexpr int kActivations = 4, kWeights = 6;

  LOWBIT_INLINE explicit TileUnit(int64_t bytes) : pairs_(bytes / 4), before_(here) { here = this; }
  LOWBIT_INLINE ~TileUnit() { here = before_; }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int tile> LOWBIT_INLINE static void zero() {
    for (int row = 0; row < kRows; row++) _mm512_store_ps(here->sums_[tile] + row * 16, _mm512_setzero_ps());
  }
  LOWBIT_INLINE static void before_loads() {}
  template <int tile> LOWBIT_INLINE static void load(const void* rows, int64_t stride) {
    if constexpr (tile >= kActivations) here->operands_[tile - kActivations] = {static_cast<const char*>(rows), stride};
    else
      for (int64_t row = 0; row < kRows; row++)
        _mm512_store_ps(here->sums_[tile] + row * 16, _mm512_loadu_ps(static_cast<const char*>(rows) + row * stride));
  }
  template <int tile> LOWBIT_INLINE static void store(float (&sums)[kRows * 16]) { store<tile>(sums, 64); }
  template <int tile> LOWBIT_INLINE static void store(float* rows, int64_t stride) {  // bytes
    for (int64_t row = 0; row < kRows; row++)
      _mm512_storeu_ps(reinterpret_cast<char*>(rows) + row * stride, _mm512_load_ps(here->sums_[tile] + row * 16));
  }
  // sums += bfloat16 * bfloat16, each product exact, added in float32. Subnormal factors and sums count as zero.
  template <class Sum, int sums, int activations, int weights> LOWBIT_INLINE static void add_products() {
    static_assert(std::is_same_v<Sum, float>, "codes are multiplied by vpdpbusd, in the rows of avx512_vnni");
    TileUnit& unit = *here;
    const auto [x, stride] = unit.operands_[activations - kActivations];
    const char* const w = unit.operands_[weights - kActivations].rows;
    const char* third[6];  // rows 0, 3 .. 15; the two behind each are an address of it and the stride
    unroll<6>([&](auto i) __attribute__((always_inline)) { third[i] = x + 3 * i * stride; });
    __m512 sum[kRows];
    unroll<kRows>([&](auto row) __attribute__((always_inline)) {
      sum[row] = _mm512_load_ps(unit.sums_[sums] + row * 16);
    });
    for (int64_t pair = 0; pair < unit.pairs_; pair++) {
      const __m512i of_w = _mm512_loadu_si512(w + pair * 64);
      unroll<kRows>([&](auto row) __attribute__((always_inline)) {
        __asm__("vdpbf16ps %2%{1to16%}, %1, %0"
                : "+v"(sum[row])
                : "v"(of_w), "m"(*reinterpret_cast<const Pair*>(third[row / 3] + row % 3 * stride)));
      });
      unroll<6>([&](auto i) __attribute__((always_inline)) { third[i] += 4; });
    }
    unroll<kRows>([&](auto row) __attribute__((always_inline)) {
      _mm512_store_ps(unit.sums_[sums] + row * 16, sum[row]);
    });
  }

 private:
  using Pair [[gnu::may_alias]] = int32_t;
  struct Operand {
    const char* rows;
    int64_t stride;
  };
  alignas(64) float sums_[4][kRows * 16];
  Operand operands_[4];
  int64_t pairs_;
  TileUnit* before_;
  static inline thread_local TileUnit* here = nullptr;
};

// 32 floats rounded to bfloat16 as store_bf16 does it, but subnormal ones to zero.
LOWBIT_INLINE void store_32_bf16(uint16_t* p, f32x16 a, f32x16 b) {
  __m512i rounded;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(a.v), "v"(b.v));
  _mm512_storeu_si512(p, rounded);
}
// Likewise, a and b side by side: of each lane the bfloat16 of a, then of b.
LOWBIT_INLINE i32x16 bf16_pairs(f32x16 a, f32x16 b) {
  __m512i rounded;
  __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(rounded) : "v"(a.v), "v"(b.v));
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(rounded)),
                high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(rounded, 1));
  return {_mm512_or_si512(low, _mm512_slli_epi32(high, 16))};
}

// Each half of a lane looked up in 32 numbers by its lowest five bits.
LOWBIT_INLINE i32x16 lookup32_u16(const uint16_t* table, i32x16 index) {
  return {_mm512_permutexvar_epi16(index.v, _mm512_load_si512(table))};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
