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
  static constexpr bool kGroupsInRegisters = true;  // and for the groups of a factor: add_groups
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
  // results[panel] = add(sum, group, panel, row, results[panel]) for each group of `per_group` steps, and 16 rows. Only
  // sums are in registers, but for 16 products each: groups of 32 take 1.06 times as long as none, where a tile that
  // stored its sums took 1.7 times (Zen 5).
  template <int kPanels, class Weights, class Add>
  LOWBIT_INLINE static void add_groups(float* const (&results)[kPanels], TileRows activations, Weights&& weights,
                                       int64_t steps, int64_t per_group, Add&& add) {
    constexpr int kCount = kRows / kPanels;
    const int64_t stride = activations.stride, pairs = here->pairs_;
    for (int64_t first = 0; first < kRows; first += kCount) {
      const char *x = static_cast<const char*>(activations.rows) + first * stride, *w[kPanels];
      unroll<kPanels>([&](auto p) __attribute__((always_inline)) { w[p] = static_cast<const char*>(weights(p).rows); });
      for (int64_t group = 0, step = 0; step < steps; group++) {
        __m512 sum[kPanels][kCount] = {};
        for (const int64_t end = step + per_group < steps ? step + per_group : steps; step < end; step++)
          add_tile(sum, w, weights(0).step - 64 * pairs, x, stride, activations.step - 4 * pairs);
        unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
          unroll<kCount>([&](auto row) __attribute__((always_inline)) {
            float* const result = results[p] + (first + row) * 16;
            _mm512_store_ps(result, add(f32x16{sum[p][row]}, group, p, first + row, f32x16{_mm512_load_ps(result)}).v);
          });
        });
      }
    }
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
    for (int64_t step = 0; step < steps; step++) {
      unroll<kCount>([&](auto row) __attribute__((always_inline)) {  // 1.03x: the next tile is in L2
        __builtin_prefetch(x + activations.step + row * stride);
      });
      add_tile(sum, w, w_step, x, stride, x_step);
    }
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
      unroll<kCount>([&](auto row) __attribute__((always_inline)) {
        _mm512_store_ps(unit.sums_[sums + p] + (first + row) * 16, sum[p][row]);
      });
    });
  }
  // The products of one tile of each factor, whose addresses go on to the next.
  template <int kPanels, int kCount>
  LOWBIT_INLINE static void add_tile(__m512 (&sum)[kPanels][kCount], const char* (&w)[kPanels], int64_t w_step,
                                     const char*& x, int64_t stride, int64_t x_step) {
    for (int64_t pair = 0; pair < here->pairs_; pair++, x += 4) {
      __m512i of_w[kPanels];
      unroll<kPanels>([&](auto p) __attribute__((always_inline)) { of_w[p] = _mm512_loadu_si512(w[p]), w[p] += 64; });
      unroll<kCount>([&](auto row) __attribute__((always_inline)) {
        if constexpr (kPanels == 1) {
          add_pairs(sum[0][row], of_w[0], x + row * stride);
        } else {
          const __m512i of_x = _mm512_set1_epi32(*reinterpret_cast<const Pair*>(x + row * stride));
          unroll<kPanels>([&](auto p) __attribute__((always_inline)) { add_pairs(sum[p][row], of_w[p], of_x); });
        }
      });
    }
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) { w[p] += w_step; });
    x += x_step;
  }
  // sum += w * the pair of x: in memory, or in all lanes of a register where two panels share it. Zen 5 loads two
  // operands in the time of two products, so that two panels with memory operands wait for loads (M=512: 1.14x). A
  // function: clang 15 takes no captured variable as an operand of asm.
  LOWBIT_INLINE static void add_pairs(__m512& sum, __m512i w, const char* x) {
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Pair*>(x)));
  }
  LOWBIT_INLINE static void add_pairs(__m512& sum, __m512i w, __m512i x) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));
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
