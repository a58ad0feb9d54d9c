// SPDX-License-Identifier: Apache-2.0
// The step of a recurrent state over a chunk of tokens: it decays, and a product of two matrices is added.
#pragma once

#include "cpu/tile_products.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// to = decay from + left^T right: the step of a state, and backwards that of its gradient.
struct StateStep {
  const float* decay;         // the decay of each row of the state
  Matrix<float> left, right;  // [depth, rows], [depth, columns]
  int64_t depth;
};

template <int kRows, int kVectors>
LOWBIT_INLINE void step_tile(const StateStep& step, Matrix<float> from, Matrix<float> to, int64_t row, int64_t column) {
  f32x16 sums[kRows][kVectors];
  unroll<kRows>([&](auto r) {
    const f32x16 decay = set1(step.decay[row + r]);
    unroll<kVectors>([&](auto v) { sums[r][v] = mul(load(from.row(row + r) + column + v * 16), decay); });
  });
  for (int64_t i = 0; i < step.depth; i++) {
    f32x16 added[kVectors];
    unroll<kVectors>([&](auto v) { added[v] = load(step.right.row(i) + column + v * 16); });
    unroll<kRows>([&](auto r) {
      const f32x16 factor = set1(step.left.row(i)[row + r]);
      unroll<kVectors>([&](auto v) { sums[r][v] = fma(factor, added[v], sums[r][v]); });
    });
  }
  unroll<kRows>(
      [&](auto r) { unroll<kVectors>([&](auto v) { store(to.row(row + r) + column + v * 16, sums[r][v]); }); });
}

// Columns are rounded up to 16.
void step_state(const StateStep& step, Matrix<float> from, Matrix<float> to, int64_t rows, int64_t columns) {
  const RowTiles tiles(rows, kFloatRows);
  for (int64_t j = 0; j < columns; j += 16 * kFloatPanels)
    with_count<kFloatPanels>(static_cast<int>(smaller(kFloatPanels, ceil_div(columns - j, 16))), [&](auto kVectors) {
      for (int64_t tile = 0; tile < tiles.count; tile++)
        with_count<kFloatRows>(tiles.height(tile), [&](auto kRows) {
          step_tile<kRows, kVectors>(step, from, to, tiles.begin(tile), j);
        });
    });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
