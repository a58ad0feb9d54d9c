// SPDX-License-Identifier: Apache-2.0
// The forward: a work-group has a tile of queries of one head, with a running softmax over the keys that it may see.
// The keys of a tile, and then its values, use the same local memory.
#pragma once

#include "level_zero/attention/running.hpp"
#include "level_zero/attention/scores.hpp"

namespace lowbit::level_zero {

template <int kColumns, bool kMods>
struct Forward {
  static constexpr ForwardShape kShape{kColumns};
  static constexpr int kRows = kShape.rows();
  using Sums = Running<kColumns, kRows>;

  struct Shared {
    alignas(16) float q[kShape.q_tile()][kColumns];
    SharedTile<kColumns> tile;
  };

  const AttentionCall& call;
  Shared& shared;
  int thread, first;  // first: query of this sub-group in the tile
  Sums sums;

  // `rows` rows, with zeros past the last row and column.
  template <int kTileRows, int kTo>
  LOWBIT_INLINE void load(float (&to)[kTileRows][kTo], const gpu::HeadRows& tensor, int b, int h, int row, int rows,
                          int columns) const {
    const int64_t begin = b * tensor.batch + h * tensor.head + row * tensor.row;
    for (int at = thread; at < kTileRows * kColumns; at += kAttentionThreads) {
      const int r = at / kColumns, column = at % kColumns;
      to[r][column] = r < rows && column < columns
                          ? load_real(tensor.data, call.dtype, begin + r * tensor.row + column) : 0.0f;
    }
  }

  // Calls each(row, key, score) for every score of a tile.
  template <class Each>
  LOWBIT_INLINE void for_each(const gpu::TilePosition& at, Scores<kRows>& s, Each each) const {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kKeys; j++) each(at.q0 + first + r, at.k0 + sums.lane + j * kSubGroup, s[r][j]);
  }

  LOWBIT_INLINE void run(int b, int h, const gpu::TileStep& q_step) {
    gpu::TilePosition at;
    for (gpu::TileStep step; step.index < static_cast<int>(call.kv_tiles.count); step.next(call.kv_tiles)) {
      if (!gpu::find_tile(call, b, h, q_step, step, at)) continue;
      at.cut |= at.cols < kKvTile;
      __syncthreads();  // all threads are done with the values before
      load(shared.tile.rows, call.k, b, h / call.group, at.k0, at.cols, call.e);
      __syncthreads();
      Scores<kRows> s;
      multiply_rows(s, sums.q, shared.tile, sums.lane, call.e);
      __syncthreads();
      load(shared.tile.rows, call.v, b, h / call.group, at.k0, at.cols, call.ev);
      for_each(at, s, [&](int q, int k, float& score) { score = modified<kMods>(call, at, score, q, k); });
      sums.softmax(s);
      if (call.dropped)
        for_each(at, s, [&](int q, int k, float& p) {
          const uint32_t draw = gpu::dropout_draw(*global<int64_t>(call.seed), b * call.heads + h, q, k);
          p *= draw < call.dropped ? 0.0f : call.kept;
        });
      __syncthreads();
      multiply_onto<kRows, kColumns>(sums.out, s, shared.tile, sums.lane);
    }
  }

  // The result overwrites the queries.
  LOWBIT_INLINE void finish(int b, int h, int q0, int rows) {
    __syncthreads();  // queries have arrived, even if no tile was visible
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float total = sum_of_lanes(sums.total[r]);
      const bool writes = first + r < rows && sums.lane == 0;
      const float by = finish_row(call, b, h, q0 + first + r, sums.top[r], total, writes);
#pragma unroll
      for (int c = 0; c < Sums::kSums; c++) shared.q[first + r][sums.lane + c * kSubGroup] = sums.out[r][c] * by;
    }
    store_rows(call.out, call.out_dtype, b * call.out.batch + h * call.out.head + q0 * call.out.row, shared.q, rows,
               call.ev);
  }
};

template <int kColumns, bool kMods>
LOWBIT_INLINE void attention_forward(const AttentionCall& call) {
  using F = Forward<kColumns, kMods>;
  LOWBIT_SHARED(typename F::Shared, shared, );
  const auto [b, h, q_step, q0, rows] = gpu::query_tile(call, static_cast<int>(blockIdx.x));
  const auto thread = static_cast<int>(threadIdx.x);
  const int first = thread / kSubGroup * F::kRows;
  F forward{.call = call, .shared = shared, .thread = thread, .first = first,
            .sums = {.q = shared.q + first, .lane = thread % kSubGroup}};
  forward.load(shared.q, call.q, b, h, q0, rows, call.e);
  forward.sums.start();
  forward.run(b, h, q_step);
  forward.finish(b, h, q0, rows);
}

}  // namespace lowbit::level_zero
