// SPDX-License-Identifier: Apache-2.0
// The tile unit (amx.hpp) by the matrix products of Arm, which multiply two rows of 8 bytes by two columns of 8 bytes
// and add to 2 x 2 sums. The including header has that product, add_matrix, and the type of its sums, TileSum. 8 x 8
// sums are in 16 registers for the duration of a product. Both factors lie in memory as the product reads them, two rows
// or two columns in one register; made once for all products (figures: docs/measured/arm.md).
//
//   a tile of activations   [pair of rows][8 bytes along k][2 rows]      join_rows
//   a tile of weights       [8 bytes along k][pair of columns][2]        join_columns, of a packed tile
#pragma once

#include "cpu/loops.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// RAII: the tiles of this thread, with the interface of amx.hpp. Loading activations or weights stores the address of
// their rows, from which a product reads them.
class TileUnit : public TileNumbers {
 public:
  static constexpr bool kSumsInRegisters = true;  // for consecutive tiles of one factor: add_steps
  static constexpr int64_t kRowsTogether = 2;
  static constexpr int64_t kL1 = 64 << 10, kL2 = 1 << 20;  // of Neoverse N1, N2, V1 and V2

  LOWBIT_INLINE explicit TileUnit(int64_t bytes) : eights_(bytes / 8), before_(here) { here = this; }
  LOWBIT_INLINE ~TileUnit() { here = before_; }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;

  // `to` gets 8 bytes of each row in turn. It may be the first of two rows of which `first` is a copy.
  LOWBIT_INLINE static void join_rows(const void* first, const void* second, int64_t bytes, void* to) {
    for (int64_t at = 0; at < bytes; at += 8)
      vst1q_s8(static_cast<int8_t*>(to) + 2 * at, vcombine_s8(vld1_s8(static_cast<const int8_t*>(first) + at),
                                                               vld1_s8(static_cast<const int8_t*>(second) + at)));
  }
  // Whole tiles, of 16 columns x 4 bytes along k in each 64 bytes, in place.
  LOWBIT_INLINE static void join_columns(void* tiles, int64_t bytes) {
    for (int32_t *at = static_cast<int32_t*>(tiles), *end = at + bytes / 4; at < end; at += 32) {
      const i32x16 low = load_i32(at), high = load_i32(at + 16);
      for (int i = 0; i < 4; i++) {
        vst1q_s32(at + 8 * i, vzip1q_s32(low.q[i], high.q[i]));
        vst1q_s32(at + 8 * i + 4, vzip2q_s32(low.q[i], high.q[i]));
      }
    }
  }

  // Accumulators, zero or loaded, are moved to registers when there is a product to add.
  template <int tile> LOWBIT_INLINE static void zero() { here->begin_[tile] = {kZeros, 0}; }
  LOWBIT_INLINE static void before_loads() {}
  template <int tile> LOWBIT_INLINE static void load(const void* rows, int64_t stride) {
    here->begin_[tile] = {rows, stride};
  }
  template <int tile> LOWBIT_INLINE static void store(TileSum (&sums)[kRows * 16]) { store<tile>(sums, 64); }
  template <int tile> LOWBIT_INLINE static void store(TileSum* rows, int64_t stride) {  // stride in bytes
    const auto& [from, from_stride, step] = here->begin_[tile];
    for (int64_t row = 0; row < kRows; row++)
      store_i32(reinterpret_cast<int32_t*>(reinterpret_cast<char*>(rows) + row * stride),
                load_i32(reinterpret_cast<const int32_t*>(static_cast<const char*>(from) + row * from_stride)));
  }
  // kPanels tiles of accumulators += activations * weights over `steps` consecutive tiles.
  template <int sums, int kPanels, class Weights>
  LOWBIT_INLINE static void add_steps(TileRows activations, Weights&& weights, int64_t steps) {
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
      here->add_tiles(sums + p, activations, weights(p), steps);
      load<sums + p>(here->sums_[sums + p], 64);
    });
  }
  template <class Sum, int sums, int activations, int weights> LOWBIT_INLINE static void add_products() {
    add_steps<sums, 1>(here->begin_[activations], [](int) { return here->begin_[weights]; }, 1);
  }

 private:
  static constexpr int64_t kBlock = 8;  // rows and columns of the sums in registers

  [[gnu::noinline]] void add_tiles(int tile, TileRows activations, TileRows weights, int64_t steps) {
    for (int64_t row = 0; row < kRows; row += kBlock)
      for (int64_t column = 0; column < 16; column += kBlock) add_block(tile, row, column, activations, weights, steps);
  }
  LOWBIT_INLINE void add_block(int tile, int64_t row, int64_t column, TileRows activations, TileRows weights,
                               int64_t steps) {
    constexpr int kPairs = kBlock / 2;
    const TileRows& begin = begin_[tile];
    const char* const from = static_cast<const char*>(begin.rows) + row * begin.stride + column * 4;
    int32x4_t sums[kPairs][kPairs];
    for (int r = 0; r < kPairs; r++)
      for (int c = 0; c < kPairs; c += 2) {
        const char* const first = from + 2 * r * begin.stride + c * 8;
        const int64x2_t upper = vreinterpretq_s64_s32(vld1q_s32(reinterpret_cast<const int32_t*>(first))),
                        lower = vreinterpretq_s64_s32(
                            vld1q_s32(reinterpret_cast<const int32_t*>(first + begin.stride)));
        sums[r][c] = vreinterpretq_s32_s64(vzip1q_s64(upper, lower));
        sums[r][c + 1] = vreinterpretq_s32_s64(vzip2q_s64(upper, lower));
      }
    const int64_t stride = 2 * activations.stride, x_step = activations.step - 16 * eights_,
                  w_step = weights.step - 128 * eights_;
    const int8_t *x = static_cast<const int8_t*>(activations.rows) + row * activations.stride,
                 *w = static_cast<const int8_t*>(weights.rows) + column * 8;
    for (int64_t step = 0; step < steps; step++, x += x_step, w += w_step)
      for (int64_t eight = 0; eight < eights_; eight++, x += 16, w += 128)
        for (int c = 0; c < kPairs; c++) {
          const int8x16_t columns = vld1q_s8(w + 16 * c);
          for (int r = 0; r < kPairs; r++) sums[r][c] = add_matrix(sums[r][c], vld1q_s8(x + r * stride), columns);
        }
    int32_t* const to = reinterpret_cast<int32_t*>(sums_[tile]) + row * 16 + column;
    for (int r = 0; r < kPairs; r++)
      for (int c = 0; c < kPairs; c += 2) {
        const int64x2_t left = vreinterpretq_s64_s32(sums[r][c]), right = vreinterpretq_s64_s32(sums[r][c + 1]);
        vst1q_s32(to + 2 * r * 16 + 2 * c, vreinterpretq_s32_s64(vzip1q_s64(left, right)));
        vst1q_s32(to + (2 * r + 1) * 16 + 2 * c, vreinterpretq_s32_s64(vzip2q_s64(left, right)));
      }
  }

  alignas(64) static constexpr TileSum kZeros[16] = {};
  alignas(64) TileSum sums_[kActivations][kRows * 16];
  TileRows begin_[8];  // initial values of the accumulators
  int64_t eights_;     // of bytes in a row
  TileUnit* before_;
  static inline thread_local TileUnit* here = nullptr;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
