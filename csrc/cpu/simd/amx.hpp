// SPDX-License-Identifier: Apache-2.0
// AVX-512 VNNI and BF16 with AMX (Intel, from Sapphire Rapids on): eight tiles of 16 rows of 64 bytes. Every 16 cycles
// a product of two tiles adds to 16 x 16 accumulators 64 products of bytes each, eight times the rate of vpdpbusd, or
// 32 of bfloat16, sixteen times the rate of float32 FMAs. Everything else is from avx512_vnni.
#pragma once

#include <type_traits>

#include "cpu/loops.hpp"
#include "cpu/simd/avx512_vnni.hpp"
#include "cpu/simd/avx512_bf16_pairs.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// RAII: configures the tile unit of this thread. Rows of activations have `bytes` bytes (32 or 64), and weights bytes /
// 4 rows of 16 columns x 4 bytes along k. Restores the earlier configuration at the end: oneDNN uses the unit too.
class TileUnit : public TileNumbers {
 public:
  static constexpr bool kSumsInRegisters = false;  // accumulators stay in the tile unit
  static constexpr int64_t kRowsTogether = 1;
  static constexpr int64_t kL1 = 48 << 10, kL2 = 2 << 20;  // of the processors that have it

  LOWBIT_INLINE explicit TileUnit(int64_t bytes) {
    __asm__ volatile("sttilecfg %0" : "=m"(before_));
    Config config{.palette = 1};
    for (int tile = 0; tile < 8; tile++) {
      config.row_bytes[tile] = static_cast<uint16_t>(tile / 2 == kActivations / 2 ? bytes : 64);
      config.rows[tile] = static_cast<uint8_t>(tile / 2 == kWeights / 2 ? bytes / 4 : kRows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
  }
  LOWBIT_INLINE ~TileUnit() { __asm__ volatile("ldtilecfg %0" ::"m"(before_)); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  template <int tile> LOWBIT_INLINE static void zero() { __asm__ volatile("tilezero %%tmm%c0" ::"i"(tile)); }
  // Orders earlier stores before the loads that follow. The loads themselves have no memory clobber, which would spill
  // registers at each of them.
  LOWBIT_INLINE static void before_loads() { __asm__ volatile("" ::: "memory"); }
  template <int tile> LOWBIT_INLINE static void load(const void* rows, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile));
  }
  template <int tile> LOWBIT_INLINE static void load_passing(const void* rows, int64_t stride) {  // not to stay in L1
    __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(tile));
  }
  template <int tile, class Sum> LOWBIT_INLINE static void store(Sum (&sums)[kRows * 16]) {
    __asm__ volatile("tilestored %%tmm%c2, (%1,%3,1)" : "=m"(sums) : "r"(sums), "i"(tile), "r"(int64_t{64}));
  }
  template <int tile> LOWBIT_INLINE static void store(float* rows, int64_t stride) {  // stride in bytes
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(tile) : "memory");
  }
  // sums += int8 activations * uint8 weights, exact in int32 unless the sum overflows; or bfloat16 * bfloat16, each
  // product exact, accumulated in float32. Subnormal factors and sums count as zero.
  template <class Sum, int sums, int activations, int weights> LOWBIT_INLINE static void add_products() {
    if constexpr (std::is_same_v<Sum, int32_t>)
      __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(activations), "i"(weights));
    else
      __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(activations), "i"(weights));
  }

 private:
  struct alignas(64) Config {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } before_;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
