// SPDX-License-Identifier: Apache-2.0
// AVX-512 BF16 where vdpbf16ps takes as long as an FMA (AMD from Zen 4 on): 32 products of bfloat16 instead of 16 of
// float32. The loops are those of the tile unit (amx.hpp), emulated by 16 rows of 16 accumulators in registers for the
// duration of a product. Everything else is from avx512_vnni.
#pragma once

#include <type_traits>

#include "cpu/loops.hpp"
#include "cpu/simd/avx512_vnni.hpp"
#include "cpu/simd/avx512_bf16_pairs.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// RAII: the tiles of this thread, with the interface of amx.hpp. Loading activations or weights stores the address of
// their rows, from which a product reads them.
class TileUnit : public TileNumbers {
 public:
  static constexpr bool kSumsInRegisters = true;  // for consecutive tiles of one factor: add_steps
  static constexpr int64_t kRowsTogether = 1;
  static constexpr int64_t kL1 = 32 << 10, kL2 = 1 << 20;  // of the processors that have it

  LOWBIT_INLINE explicit TileUnit(int64_t bytes) : pairs_(bytes / 4), before_(here) { here = this; }
  LOWBIT_INLINE ~TileUnit() { here = before_; }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  // Accumulators, zero or loaded, are moved to registers when there is a product to add.
  template <int tile> LOWBIT_INLINE static void zero() { here->begin_[tile] = {kZeros, 0}; }
  LOWBIT_INLINE static void before_loads() {}
  template <int tile> LOWBIT_INLINE static void load(const void* rows, int64_t stride) {
    here->begin_[tile] = {rows, stride};
  }
  template <int tile> LOWBIT_INLINE static void store(float (&sums)[kRows * 16]) { store<tile>(sums, 64); }
  template <int tile> LOWBIT_INLINE static void store(float* rows, int64_t stride) {  // stride in bytes
    for (int64_t row = 0; row < kRows; row++)
      _mm512_storeu_ps(reinterpret_cast<char*>(rows) + row * stride, begin<tile>(row));
  }
  // kPanels tiles of accumulators += bfloat16 * bfloat16 over `steps` consecutive tiles, each product exact,
  // accumulated in float32. Subnormal factors and sums count as zero. 16 accumulators stay in registers over all steps
  // (8 rows if there are two panels): storing them after each step took a fifth longer (Zen 4).
  template <int sums, int kPanels, class Weights>
  LOWBIT_INLINE static void add_steps(TileRows activations, Weights&& weights, int64_t steps) {
    constexpr int kCount = kRows / kPanels;
    for (int64_t first = 0; first < kRows; first += kCount)
      add_rows<sums, kPanels, kCount>(first, activations, weights, steps);
    unroll<kPanels>([](auto p) { load<sums + p>(here->sums_[sums + p], 64); });
  }
  template <class Sum, int sums, int activations, int weights> LOWBIT_INLINE static void add_products() {
    static_assert(std::is_same_v<Sum, float>, "codes are multiplied by vpdpbusd, in the rows of avx512_vnni");
    add_steps<sums, 1>(here->begin_[activations], [](int) { return here->begin_[weights]; }, 1);
  }

 private:
  template <int sums, int kPanels, int kCount, class Weights>
  LOWBIT_INLINE static void add_rows(int64_t first, TileRows activations, Weights&& weights, int64_t steps) {
    TileUnit& unit = *here;
    const int64_t stride = activations.stride;
    const char *x = static_cast<const char*>(activations.rows) + first * stride, *w[kPanels];
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) { w[p] = static_cast<const char*>(weights(p).rows); });
    const int64_t x_step = activations.step - 4 * unit.pairs_, w_step = weights(0).step - 64 * unit.pairs_;
    __m512 sum[kPanels][kCount];
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
      unroll<kCount>([&](auto row) __attribute__((always_inline)) { sum[p][row] = begin<sums + p>(first + row); });
    });
    for (int64_t step = 0; step < steps; step++, x += x_step) {
      for (int64_t pair = 0; pair < unit.pairs_; pair++, x += 4) {
        __m512i of_w[kPanels];
        unroll<kPanels>([&](auto p) __attribute__((always_inline)) { of_w[p] = _mm512_loadu_si512(w[p]), w[p] += 64; });
        unroll<kCount>([&](auto row) __attribute__((always_inline)) {
          unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
            add_pair(sum[p][row], of_w[p], x + row * stride);
          });
        });
      }
      unroll<kPanels>([&](auto p) __attribute__((always_inline)) { w[p] += w_step; });
    }
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
      unroll<kCount>([&](auto row) __attribute__((always_inline)) {
        _mm512_store_ps(unit.sums_[sums + p] + (first + row) * 16, sum[p][row]);
      });
    });
  }
  // sum += w * the pair of x. A function: clang 15 takes no captured variable as an operand of asm.
  LOWBIT_INLINE static void add_pair(__m512& sum, __m512i w, const char* x) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Pair*>(x)));
  }
  template <int tile> LOWBIT_INLINE static __m512 begin(int64_t row) {
    const auto& [rows, stride, step] = here->begin_[tile];
    return _mm512_loadu_ps(static_cast<const char*>(rows) + row * stride);
  }

  using Pair [[gnu::may_alias]] = int32_t;
  alignas(64) static constexpr float kZeros[16] = {};
  alignas(64) float sums_[kActivations][kRows * 16];
  TileRows begin_[8];  // initial values of the accumulators
  int64_t pairs_;
  TileUnit* before_;
  static inline thread_local TileUnit* here = nullptr;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
