// SPDX-License-Identifier: Apache-2.0
// A pass of the backward, by tiles or by warpgroups: its tiles of scores, and their gradients.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

template <DType dtype, int kStaying, int kPassing, class Mods, bool kKeysStay, class Call = AttentionCall>
struct Pass {
  static constexpr int kScores = kPassing / 8;
  // Probabilities are multiplied by it before rounding, since many are below 2^-14, the smallest normal number of
  // float16. They may be up to 4, where lse lacks bits of the scores.
  static constexpr float kProbabilityFactor = dtype == DType::float16 ? 0x1p14f : 1.0f;

  // A position of the pass: a tile of scores, and for keys the head of the group that its queries belong to.
  struct Visit {
    int h;
    TileStep step;
    TilePosition at;
  };

  const Call& call;
  int b, first_head;
  TileStep stays;

  LOWBIT_INLINE int row_of(int i) const { return warp_of_cta() * 16 + lane_of_warp() / 4 + i / 2 * 8; }
  LOWBIT_INLINE int column_of(int n, int i) const { return n * 8 + lane_of_warp() % 4 * 2 + i % 2; }

  struct Rows {
    const uint16_t* from;
    int64_t stride;
    int count;
    template <class To>
    LOWBIT_INLINE void copy_to(To& to) const { to.copy(from, stride, count); }
  };
  LOWBIT_INLINE Rows rows(const HeadRows& of, int h, int begin, int count) const {
    return {head_rows(of, b, h) + begin * of.row, of.row, count};
  }
  // The factors of scores, and those of the gradients of probabilities.
  LOWBIT_INLINE Rows passing_left(const Visit& visit) const {
    if constexpr (kKeysStay) return rows(call.q, visit.h, visit.at.q0, visit.at.rows);
    else return rows(call.k, visit.h / call.group, visit.at.k0, visit.at.cols);
  }
  LOWBIT_INLINE Rows passing_right(const Visit& visit) const {
    if constexpr (kKeysStay) return rows(call.grad_out, visit.h, visit.at.q0, visit.at.rows);
    else return rows(call.v, visit.h / call.group, visit.at.k0, visit.at.cols);
  }
  LOWBIT_INLINE const Tiling& staying_tiles() const { return kKeysStay ? call.kv_tiles : call.q_tiles; }
  LOWBIT_INLINE const Tiling& passing_tiles() const { return kKeysStay ? call.q_tiles : call.kv_tiles; }
  LOWBIT_INLINE Rows staying_left() const {
    const int begin = stays.begin(staying_tiles()), count = stays.size(staying_tiles());
    if constexpr (kKeysStay) return rows(call.k, first_head / call.group, begin, count);
    else return rows(call.q, first_head, begin, count);
  }
  LOWBIT_INLINE Rows staying_right() const {
    const int begin = stays.begin(staying_tiles()), count = stays.size(staying_tiles());
    if constexpr (kKeysStay) return rows(call.v, first_head / call.group, begin, count);
    else return rows(call.grad_out, first_head, begin, count);
  }

  // The next visible tile from `visit` on; false after the last.
  LOWBIT_INLINE bool find_next(Visit& visit) const {
    const Tiling& tiling = passing_tiles();
    for (const int end = kKeysStay ? first_head + call.group : first_head + 1; visit.h < end;
         visit.h++, visit.step = TileStep()) {
      while (visit.step.index < static_cast<int>(tiling.count)) {
        const TileStep &q = kKeysStay ? visit.step : stays, &k = kKeysStay ? stays : visit.step;
        if (find_tile(call, b, visit.h, q, k, visit.at)) {
          visit.at.cut |= visit.at.rows < (kKeysStay ? kPassing : kStaying) ||
                          visit.at.cols < (kKeysStay ? kStaying : kPassing);
          return true;
        }
        visit.step.next(tiling);
        pass_empty<!kKeysStay>(call, b, visit.h, stays, visit.step);
      }
    }
    return false;
  }

  // A number for each query of this lane's scores.
  struct OfScores {
    static constexpr int kCount = kKeysStay ? 2 * kScores : 2;
    float numbers[kCount];

    LOWBIT_INLINE static int query(int j) {  // index among the queries of a tile that passes, or of a warp
      return kKeysStay ? j / 2 * 8 + j % 2 + first_column() : j * 8 + first_row();
    }
    LOWBIT_INLINE float operator()(int n, int i) const { return numbers[kKeysStay ? 2 * n + i % 2 : i / 2]; }
  };
  // Each lane of the warp has the number of one query, and shares it.
  LOWBIT_INLINE static int query_of_lane() { return lane_of_warp() % (kKeysStay ? kPassing : 16); }
  LOWBIT_INLINE static OfScores share(float number) {
    OfScores all;
#pragma unroll
    for (int j = 0; j < OfScores::kCount; j++) all.numbers[j] = __shfl_sync(kWarp, number, OfScores::query(j));
    return all;
  }
  LOWBIT_INLINE int64_t row(const TilePosition& at, int query) const {  // index among all queries, at most the last
    return (static_cast<int64_t>(b) * call.heads + at.h) * call.q_tiles.length + at.q0 +
           (query < at.rows ? query : at.rows - 1);
  }
  LOWBIT_INLINE int64_t row_of_lane(const TilePosition& at) const {
    return row(at, (kKeysStay ? 0 : warp_of_cta() * 16) + query_of_lane());
  }

  // Statistics of the queries of this lane's scores: of one query each, shared by the lanes of a warp; of all of them,
  // in registers; or in shared memory, read on use.
  struct StatisticsOfLanes {
    RowStatistics own;
    LOWBIT_INLINE bool has_rest() const { return own.has_rest(); }  // for the query of this lane
    LOWBIT_INLINE OfScores lse() const { return share(own.lse); }
    LOWBIT_INLINE OfScores delta() const { return share(own.delta); }
  };
  struct KeptStatistics {
    RowStatistics own;
    OfScores of_lse = share(own.lse), of_delta = share(own.delta);
    LOWBIT_INLINE bool has_rest() const { return own.has_rest(); }
    LOWBIT_INLINE const OfScores& lse() const { return of_lse; }
    LOWBIT_INLINE const OfScores& delta() const { return of_delta; }
  };
  struct StatisticsOfTile {
    const RowStatistics* rows;
    LOWBIT_INLINE bool has_rest() const { return rows[query_of_lane()].has_rest(); }
    LOWBIT_INLINE OfScores lse() const { return read(&RowStatistics::lse); }
    LOWBIT_INLINE OfScores delta() const { return read(&RowStatistics::delta); }
    LOWBIT_INLINE OfScores read(float RowStatistics::*number) const {
      OfScores all;
#pragma unroll
      for (int j = 0; j < OfScores::kCount; j++) all.numbers[j] = rows[OfScores::query(j)].*number;
      return all;
    }
  };

  // Turns raw products s and gradients dp of probabilities into probabilities, times kProbabilityFactor or 0 if
  // dropped, and gradients of raw scores.
  template <bool kCut, class Of>
  LOWBIT_INLINE void differentiate(const TilePosition& at, const Of& statistics, float (&s)[1][kScores][4],
                                   float (&dp)[1][kScores][4]) const {
    float p[1][kScores][4], kept[1][kScores][4];
    const auto for_each = [](auto each) {
#pragma unroll
      for (int n = 0; n < kScores; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) each(n, i);
    };
    for_each([&](int n, int i) { p[0][n][i] = s[0][n][i] *= call.scale, kept[0][n][i] = 1; });
    modify<Mods, kKeysStay, kCut>(call, at, p);
    const OfScores lse = statistics.lse();
    for_each([&](int n, int i) { p[0][n][i] = power_of_2((p[0][n][i] - lse(n, i)) * kLog2e); });
    if (const bool has_rest = statistics.has_rest(); __any_sync(kWarp, has_rest)) {
      const OfScores unit = share(has_rest ? call.unit[row_of_lane(at)] : 1.0f);
      for_each([&](int n, int i) { p[0][n][i] *= unit(n, i); });
    }
    if constexpr (Mods::kDropout)
      for_each_score<kKeysStay>(at, kept,
                                [&](float& factor, int q, int k) { factor = dropout_factor(call, at, q, k); });
    const OfScores delta = statistics.delta();
    for_each([&](int n, int i) { dp[0][n][i] = p[0][n][i] * (dp[0][n][i] * kept[0][n][i] - delta(n, i)); });
    if constexpr (Mods::kScore) {
      const auto mod = Mods::gradient(call, at.b, at.h);
      for_each_with<kKeysStay, kCut, 1, kScores>(mod, at, [&](int, int n, int i, int q, int k, const auto&... values) {
        float& ds = dp[0][n][i];
        ds = p[0][n][i] == 0 ? 0.0f : mod.of_score(s[0][n][i], ds, q, k, values...);
      });
    }
    for_each([&](int n, int i) { s[0][n][i] = kept[0][n][i] == 0 ? 0.0f : p[0][n][i] * kProbabilityFactor; });
  }

  template <int kColumns>
  LOWBIT_INLINE void store_columns(const HeadRows& to, const float (&from)[1][kColumns][4], int h, int first,
                                   int columns, float scale) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (row_of(i) >= stays.size(staying_tiles())) continue;
#pragma unroll
      for (int n = 0; n < kColumns; n++)
        if (first + n * 8 < columns)
          store_pair<dtype>(to, dtype, b, h, stays.begin(staying_tiles()) + row_of(i), first + column_of(n, 0),
                            from[0][n][i] * scale, from[0][n][i + 1] * scale);
    }
  }
  // The gradients of the rows that stay: of all those columns, the ones that this CTA has.
  template <int kColumns, int kValueColumns>
  LOWBIT_INLINE void store(const float (&grad)[1][kColumns][4], int columns,
                           const float (&grad_values)[1][kValueColumns][4], int value_columns, int first = 0,
                           int first_value = 0) const {
    const int h = kKeysStay ? first_head / call.group : first_head;
    store_columns(kKeysStay ? call.grad_k : call.grad_q, grad, h, first, columns, call.scale);
    if constexpr (kKeysStay)
      store_columns(call.grad_v, grad_values, h, first_value, value_columns,
                    (Mods::kDropout ? call.kept : 1.0f) / kProbabilityFactor);
  }
};

// The heads and rows of a CTA: under causality the first keys and the last queries have most work, and come first.
template <class P, bool kKeysStay, class Call>
LOWBIT_INLINE P pass_of(const Call& call, int task) {
  const Tiling& tiling = kKeysStay ? call.kv_tiles : call.q_tiles;
  const int each = kKeysStay ? call.heads / call.group : call.heads, heads = call.batch * each, turn = task / heads;
  return {.call = call, .b = task % heads / each, .first_head = task % heads % each * (kKeysStay ? call.group : 1),
          .stays = TileStep::at(tiling, kKeysStay ? turn : static_cast<int>(tiling.count) - 1 - turn)};
}

}  // namespace lowbit::cuda
