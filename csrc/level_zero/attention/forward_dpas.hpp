// SPDX-License-Identifier: Apache-2.0
// The forward with dpas: a work-group has a tile of queries of one head, divided among its sub-groups, with a running
// softmax in float32 over the keys that it may see. Probabilities are rounded to the dtype of the values.
#pragma once

#include "level_zero/attention/products.hpp"
#include "level_zero/attention/scores.hpp"

namespace lowbit::level_zero {

template <int kColumns, bool kMods>
struct ForwardDpas {
  static constexpr DpasShape kShape{kColumns, kLanes};
  static constexpr int kRows = kShape.rows(), kSums = kColumns / kLanes;
  using Row = Rows<float, kRows>;

  struct Shared {
    OwnRows<kRows, kColumns> q;
    RowFactor<kColumns> k;
    PairFactor<kColumns> v;
    ScoreMemory<kRows> scores;
  };

  const AttentionCall& call;
  Shared& shared;
  int lane, first;  // first: query of this sub-group in the tile
  Row out[kSums], top, total;

  template <class Combine>
  LOWBIT_INLINE static void over_lanes(Row& values, Combine combine) {
#pragma unroll
    for (int step = kLanes / 2; step; step /= 2)
#pragma unroll
      for (int r = 0; r < kRows; r++) values[r] = combine(values[r], shuffled_xor(values[r], step));
  }

  // score = each(query, key, score) for every score of this lane.
  template <class Each>
  LOWBIT_INLINE void for_each(const gpu::TilePosition& at, LaneScores<kRows>& s, Each each) const {
    for_each_score<kRows>(s, shared.scores, [&](int j, int r, float score) LOWBIT_LAMBDA {
      return each(at.q0 + first + r, at.k0 + key_of(lane, j), score);
    });
  }

  LOWBIT_INLINE void modify(const gpu::TilePosition& at, LaneScores<kRows>& s) const {
    if (kMods || call.bias)
      return for_each(at, s, [&](int q, int k, float score) LOWBIT_LAMBDA {
        return modified<kMods>(call, at, score, q, k);
      });
#pragma unroll
    for (int j = 0; j < kLaneScores; j++)
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        s[j][r] *= call.scale;
        if (at.cut && gpu::is_hidden(call, at, at.q0 + first + r, at.k0 + key_of(lane, j)))
          s[j][r] = gpu::minus_infinity();
      }
  }

  // Turns scores into powers of e relative to the largest so far, and rescales sums and result.
  LOWBIT_INLINE void softmax(LaneScores<kRows>& s) {
    Row largest = top, shrink;
#pragma unroll
    for (int j = 0; j < kLaneScores; j++)
#pragma unroll
      for (int r = 0; r < kRows; r++) largest[r] = larger_of(largest[r], s[j][r]);
    over_lanes(largest, [](float a, float b) LOWBIT_LAMBDA { return larger_of(a, b); });
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const float base = largest[r] == gpu::minus_infinity() ? 0.0f : largest[r];
      shrink[r] = exponential(top[r] - base);
      total[r] *= shrink[r];
#pragma unroll
      for (int j = 0; j < kLaneScores; j++) {
        s[j][r] = exponential(s[j][r] - base);
        total[r] += s[j][r];
      }
    }
    top = largest;
#pragma unroll
    for (int c = 0; c < kSums; c++) out[c] *= shrink;
  }

  LOWBIT_INLINE void run(int b, int h, const gpu::TileStep& q_step) {
    HeadReader keys(call.k, b, h / call.group, call.e), values(call.v, b, h / call.group, call.ev);
    gpu::TilePosition at;
    for (gpu::TileStep step; step.index < static_cast<int>(call.kv_tiles.count); step.next(call.kv_tiles)) {
      if (!gpu::find_tile(call, b, h, q_step, step, at)) continue;
      at.cut |= at.cols < kKvTile;
      __syncthreads();  // all threads are done with the tile before
      keys.first = values.first = at.k0, keys.rows = values.rows = at.cols;
      shared.k.load(keys), shared.v.load(values);
      __syncthreads();
      LaneScores<kRows> s;
      multiply_rows(s, shared.q, shared.k, lane, call.e);
      modify(at, s);
      softmax(s);
      if (call.dropped)
        for_each(at, s, [&](int q, int k, float p) LOWBIT_LAMBDA {
          const uint32_t draw = gpu::dropout_draw(*global<int64_t>(call.seed), b * call.heads + h, q, k);
          return draw < call.dropped ? 0.0f : p;
        });
      multiply_onto<kRows, kColumns>(out, s, shared.v, lane);
    }
  }

  LOWBIT_INLINE void start() {
    top = gpu::minus_infinity(), total = 0;
#pragma unroll
    for (int c = 0; c < kSums; c++) out[c] = 0;
  }

  LOWBIT_INLINE void finish(int b, int h, int q0, int rows) {
    over_lanes(total, [](float a, float b) LOWBIT_LAMBDA { return a + b; });
    float own_top = top[0], own_total = total[0];  // lane r has those of row r
#pragma unroll
    for (int r = 1; r < kRows; r++)
      if (lane == r) own_top = top[r], own_total = total[r];
    const bool writes = lane < kRows && first + lane < rows;
    const float own = finish_row(call, b, h, q0 + first + lane, own_top, own_total, writes) * call.kept;
    Row by;
#pragma unroll
    for (int r = 0; r < kRows; r++) by[r] = shuffled(own, r);
    const int64_t begin = b * call.out.batch + h * call.out.head + (q0 + first) * call.out.row;
#pragma unroll
    for (int c = 0; c < kSums; c += kLaneScores) {
      LaneScores<kRows> part;
#pragma unroll
      for (int j = 0; j < kLaneScores; j++) part[j] = out[c + j] * by;
      for_each_score<kRows>(part, shared.scores, [&](int j, int r, float value) LOWBIT_LAMBDA {
        const int column = (c + j) * kLanes + lane;
        if (first + r < rows && column < call.ev)
          store_real(call.out.data, call.out_dtype, begin + r * call.out.row + column, value);
        return value;
      });
    }
  }
};

template <int kColumns, bool kMods>
LOWBIT_INLINE void attention_forward_dpas(const AttentionCall& call) {
  using F = ForwardDpas<kColumns, kMods>;
  LOWBIT_SHARED(typename F::Shared, shared, );
  const auto [b, h, q_step, q0, rows] = gpu::query_tile(call, static_cast<int>(blockIdx.x));
  const int thread = static_cast<int>(threadIdx.x), first = thread / kLanes * F::kRows;
  F forward{.call = call, .shared = shared, .lane = thread % kLanes, .first = first};
  HeadReader queries(call.q, b, h, call.e);
  queries.first = q0 + first, queries.rows = rows - first;
  shared.q.load(queries, forward.lane);
  forward.start();
  forward.run(b, h, q_step);
  forward.finish(b, h, q0, rows);
}

}  // namespace lowbit::level_zero
