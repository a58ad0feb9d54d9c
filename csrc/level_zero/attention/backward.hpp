// SPDX-License-Identifier: Apache-2.0
// The backward. For the gradients of keys and values, a work-group keeps a tile of keys and loops over tiles of queries
// of its heads; for those of queries it keeps queries and loops over keys. Work-groups share no accumulators. Of the
// side that passes, local memory first has the factor of the gradients of probabilities (grad_out, values), then that
// of scores (queries, keys).
#pragma once

#include "level_zero/attention/sums.hpp"

namespace lowbit::level_zero {

// kCaptured: a pass only for gradients that are accumulated score by score (sums.hpp).
template <int kColumns, bool kMods, bool kKeysStay, bool kCaptured>
struct Backward {
  static constexpr BackwardShape kShape{kColumns};
  static constexpr int kRows = kShape.rows();

  struct Shared {
    alignas(16) float left[kShape.tile()][kColumns], right[kShape.tile()][kColumns];  // the rows that stay
    SharedTile<kColumns> tile;
  };

  const AttentionCall& call;
  Shared& shared;
  int b, first_head, thread, lane, first;  // first: row of this sub-group in the tile
  gpu::TileStep stays;
  RowSums<kRows, kColumns> grad, grad_values;

  // `rows` rows, with zeros past the last row and column.
  template <int kTileRows, int kTo>
  LOWBIT_INLINE void load(float (&to)[kTileRows][kTo], const gpu::HeadRows& tensor, DType dtype, int h, int row,
                          int rows, int columns) const {
    const int64_t begin = b * tensor.batch + h * tensor.head + row * tensor.row;
    for (int at = thread; at < kTileRows * kColumns; at += kAttentionThreads) {
      const int r = at / kColumns, column = at % kColumns;
      to[r][column] =
          r < rows && column < columns ? load_real(tensor.data, dtype, begin + r * tensor.row + column) : 0.0f;
    }
  }
  // Queries or keys, and grad_out or values.
  template <bool kQueries, int kTileRows, int kTo>
  LOWBIT_INLINE void load_left(float (&to)[kTileRows][kTo], int h, int row, int rows) const {
    load(to, kQueries ? call.q : call.k, call.dtype, kQueries ? h : h / call.group, row, rows, call.e);
  }
  template <bool kQueries, int kTileRows, int kTo>
  LOWBIT_INLINE void load_right(float (&to)[kTileRows][kTo], int h, int row, int rows) const {
    load(to, kQueries ? call.grad_out : call.v, kQueries ? call.out_dtype : call.dtype,
         kQueries ? h : h / call.group, row, rows, call.ev);
  }

  // Calls each(at, head) for every visible tile of scores.
  template <class Each>
  LOWBIT_INLINE void for_each_tile(Each each) const {
    const Tiling& passing = kKeysStay ? call.q_tiles : call.kv_tiles;
    for (int h = first_head; h < first_head + (kKeysStay ? call.group : 1); h++)
      for (gpu::TileStep step; step.index < static_cast<int>(passing.count); step.next(passing)) {
        gpu::TilePosition at;
        if (!gpu::find_tile(call, b, h, kKeysStay ? step : stays, kKeysStay ? stays : step, at)) continue;
        at.cut |= at.cols < (kKeysStay ? kShape.tile() : kKvTile) || at.rows < (kKeysStay ? kKvTile : kShape.tile());
        each(at);
      }
  }

  // Calls each(r, j, q, k) for the scores of this lane.
  template <class Each>
  LOWBIT_INLINE void for_each_score(const gpu::TilePosition& at, Each each) const {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        const int stays_at = first + r, passes_at = lane + j * kSubGroup;
        each(r, j, at.q0 + (kKeysStay ? passes_at : stays_at), at.k0 + (kKeysStay ? stays_at : passes_at));
      }
  }

  // Turns raw products s and gradients dp of probabilities into probabilities after dropout and gradients
  // of raw scores.
  LOWBIT_INLINE void differentiate(const gpu::TilePosition& at, Scores<kRows>& s, Scores<kRows>& dp) const {
    const int64_t head = (static_cast<int64_t>(b) * call.heads + at.h) * call.q_tiles.length;
    for_each_score(at, [&](int r, int j, int q, int k) LOWBIT_INLINED {
      const float raw = s[r][j], seen = modified<kMods>(call, at, raw, q, k);
      const bool hidden = seen == gpu::minus_infinity();
      const int64_t row = head + (q < at.q0 + at.rows ? q : at.q0 + at.rows - 1);
      const gpu::RowStatistics of_row = call.statistics[row];
      float p = hidden ? 0.0f : exponential(seen - of_row.lse), kept = 1;
      if (of_row.has_rest()) p *= call.unit[row];
      if (call.dropped)
        kept = gpu::dropout_draw(*call.seed, b * call.heads + at.h, q, k) < call.dropped ? 0 : call.kept;
      float ds = hidden ? 0.0f : p * (dp[r][j] * kept - of_row.delta);
      if constexpr (kCaptured) add_of_mask(at, q, k, ds);
      if constexpr (kMods)
        if (call.score.words && !hidden)
          ds = score_mod_gradient(raw * call.scale, ds, b, at.h, q, k, global<uint64_t>(call.score.words));
      s[r][j] = p * kept, dp[r][j] = ds;
    });
  }

  LOWBIT_INLINE void add_of_mask(const gpu::TilePosition& at, int q, int k, float ds) const {
    GlobalSums* const sums = sums_of(global<int32_t>(call.fault));
    if (!sums->of[Sums::kOfMask].words || ds == 0) return;
    add_to(sums, Sums::kOfMask, b * sums->mask_stride[0] + at.h * sums->mask_stride[1] + q * sums->mask_stride[2] +
                                    k * sums->mask_stride[3], ds);
  }

  // Computes the sum of probabilities of each row with a large lse, for queries that stay, before its first use.
  LOWBIT_INLINE void find_units() const {
    const int q0 = stays.begin(call.q_tiles), rows = stays.size(call.q_tiles);
    const int64_t head = (static_cast<int64_t>(b) * call.heads + first_head) * call.q_tiles.length + q0;
    if (!gpu::any_has_rest(call.statistics + head, rows)) return;
    float total[kRows][1];
    clear(total);
    for_each_tile([&](const gpu::TilePosition& at) LOWBIT_INLINED {
      __syncthreads();
      load_left<false>(shared.tile.rows, at.h, at.k0, at.cols);
      __syncthreads();
      Scores<kRows> s;
      multiply_rows(s, &shared.left[first], shared.tile, lane, call.e);
      for_each_score(at, [&](int r, int j, int q, int k) LOWBIT_INLINED {
        const float lse = call.statistics[head + (first + r < rows ? first + r : rows - 1)].lse;
        total[r][0] += exponential(modified<kMods>(call, at, s[r][j], q, k) - lse);
      });
    });
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float sum = sum_of_lanes(total[r][0]);
      if (first + r >= rows || lane != 0) continue;
      if (call.sink) sum += exponential(call.sink[first_head] - call.statistics[head + first + r].lse);
      call.unit[head + first + r] = 1.0f / sum;
    }
    barrier_of_all_memory();  // other threads of the work-group read these results
  }

  LOWBIT_INLINE void run() {
    const Tiling& tiling = kKeysStay ? call.kv_tiles : call.q_tiles;
    const int begin = stays.begin(tiling), rows = stays.size(tiling);
    load_left<!kKeysStay>(shared.left, first_head, begin, rows);
    load_right<!kKeysStay>(shared.right, first_head, begin, rows);
    clear(grad), clear(grad_values);
    if constexpr (!kKeysStay && !kCaptured) find_units();
    for_each_tile([&](const gpu::TilePosition& at) LOWBIT_INLINED {
      const int from = kKeysStay ? at.q0 : at.k0, count = kKeysStay ? at.rows : at.cols;
      Scores<kRows> s, dp;
      __syncthreads();  // all threads are done with the tile before
      load_right<kKeysStay>(shared.tile.rows, at.h, from, count);
      __syncthreads();
      multiply_rows(dp, &shared.right[first], shared.tile, lane, call.ev);
      __syncthreads();
      load_left<kKeysStay>(shared.tile.rows, at.h, from, count);
      __syncthreads();
      multiply_rows(s, &shared.left[first], shared.tile, lane, call.e);
      differentiate(at, s, dp);
      if constexpr (!kCaptured) multiply_onto<kRows, kColumns>(grad, dp, shared.tile, lane);
      if constexpr (kKeysStay) {
        __syncthreads();
        load_right<true>(shared.tile.rows, at.h, from, count);
        __syncthreads();
        multiply_onto<kRows, kColumns>(grad_values, s, shared.tile, lane);
      }
    });
    if constexpr (kCaptured) return;
    __syncthreads();  // the rows that stay have arrived, even if no tile was visible
    const int h = kKeysStay ? first_head / call.group : first_head;
    store(kKeysStay ? call.grad_k : call.grad_q, grad, shared.left, h, begin, rows, call.e, call.scale);
    if constexpr (kKeysStay) store(call.grad_v, grad_values, shared.right, h, begin, rows, call.ev, 1.0f);
  }

  // A gradient overwrites the rows that stayed.
  LOWBIT_INLINE void store(const gpu::HeadRows& to, const RowSums<kRows, kColumns>& from,
                           float (&place)[kShape.tile()][kColumns], int h, int begin, int rows, int columns,
                           float scale) const {
#pragma unroll
    for (int r = 0; r < kRows; r++)
#pragma unroll
      for (int c = 0; c < kColumns / kSubGroup; c++) place[first + r][lane + c * kSubGroup] = from[r][c] * scale;
    store_rows(to, call.dtype, b * to.batch + h * to.head + begin * to.row, place, rows, columns);
  }
};

// Under causality the first keys and the last queries have most work, and come first.
template <int kColumns, bool kMods, bool kKeysStay, bool kCaptured = false>
LOWBIT_INLINE void attention_backward(const AttentionCall& call) {
  using B = Backward<kColumns, kMods, kKeysStay, kCaptured>;
  LOWBIT_SHARED(typename B::Shared, shared, );
  const Tiling& tiling = kKeysStay ? call.kv_tiles : call.q_tiles;
  const int each = kKeysStay ? call.heads / call.group : call.heads, heads = call.batch * each,
            task = static_cast<int>(blockIdx.x), turn = task / heads;
  const int index = kKeysStay ? turn : static_cast<int>(tiling.count) - 1 - turn;
  const auto thread = static_cast<int>(threadIdx.x);
  B backward{.call = call, .shared = shared, .b = task % heads / each,
             .first_head = task % heads % each * (kKeysStay ? call.group : 1), .thread = thread,
             .lane = thread % kSubGroup, .first = thread / kSubGroup * B::kRows,
             .stays = gpu::TileStep::at(tiling, index)};
  backward.run();
}

// D = sum of grad_out * out - grad_lse: one sub-group per row.
LOWBIT_INLINE void row_statistics(const AttentionCall& call) {
  const int64_t length = call.q_tiles.length,
                at = static_cast<int64_t>(blockIdx.x) * kSubGroups + threadIdx.x / kSubGroup;
  if (at >= length * call.heads * call.batch) return;
  const int64_t row = at % length, h = at / length % call.heads, b = at / length / call.heads;
  const auto begin = [&](const gpu::HeadRows& of) { return b * of.batch + h * of.head + row * of.row; };
  const int lane = static_cast<int>(threadIdx.x) % kSubGroup;
  float sum = 0;
  for (int column = lane; column < call.ev; column += kSubGroup)
    sum = __fmaf_rn(load_real(call.out.data, call.out_dtype, begin(call.out) + column),
                    load_real(call.grad_out.data, call.out_dtype, begin(call.grad_out) + column), sum);
  sum = sum_of_lanes(sum);
  if (lane != 0) return;
  const float lse = call.lse[at];
  call.statistics[at] = {lse == gpu::minus_infinity() ? 0.0f : lse, sum - (call.grad_lse ? call.grad_lse[at] : 0.0f)};
}

// One work-group per head; the order of the sum is fixed.
LOWBIT_INLINE void sink_gradient(const AttentionCall& call) {
  LOWBIT_SHARED(float, sums, [kAttentionThreads]);
  sums[threadIdx.x] =
      gpu::sink_gradient_of_thread<float>(call, [](float a) LOWBIT_LAMBDA { return exponential(a); });
  for (int half = kAttentionThreads / 2; half; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) call.grad_sink[blockIdx.x] = sums[0];
}

}  // namespace lowbit::level_zero
