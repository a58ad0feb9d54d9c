// SPDX-License-Identifier: Apache-2.0
// Backward, from q, k, v, grad_out, lse and D = sum of grad_out * out - grad_lse, per tile of scores:
//   p = exp(s - lse), times a factor (unit) that makes them add up to 1 where lse is large (a mask of finfo.min)
//   dp = dropout(grad_out v^T);  ds = p (dp - D), through score_mod back to the raw scores
//   grad_v += dropout(p)^T grad_out;  grad_k += scale * ds^T q;  grad_q += scale * ds k
// Two passes, nothing is added by two CTAs: one keeps a tile of keys and values, and queries and grad_out pass, for the
// heads of a group one after the other; the other keeps queries and grad_out, and keys and values pass. The rows of
// scores are the side that stays, so that scores are the left factor of the next product as they are.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

// kCaptured: a pass only for the gradients of captured tensors, to which Mods::gradient adds.
template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay, bool kCaptured>
struct Backward {
  static constexpr BackwardShape kShape = backward_shape(kE, kEv, Mods::kGathers);
  static constexpr int kRows = kShape.kStaying, kScores = kShape.passing / 8;
  static constexpr int kPairs = (kE / 16 + kShape.parts - 1) / kShape.parts,  // of 16 columns that a CTA makes
                       kValuePairs = (kEv / 16 + kShape.parts - 1) / kShape.parts;
  static constexpr int kStride = kE + kRowPad, kValueStride = kEv + kRowPad;
  // Rows that stay in registers too.
  static constexpr bool kKeeps = !kKeysStay && Mods::kGathers == Gathers::none && kE + kEv <= 256;
  // Probabilities are multiplied by it before they are rounded, since many are below the normal numbers of float16, of
  // which 2^-14 is the least. They may be up to 4, where lse lacks bits of the scores.
  static constexpr float kProbabilityFactor = dtype == DType::float16 ? 0x1p14f : 1.0f;

  struct Passing {
    SharedRows<kShape.passing, kE> left;     // queries or keys
    SharedRows<kShape.passing, kEv> right;   // grad_out or values
  };
  struct Shared {
    SharedRows<kRows, kE> left;
    SharedRows<kRows, kEv> right;
    Passing passing[kShape.stages];
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  // The position of the pass: a tile of scores, and for keys the head of the group that its queries are of.
  struct Visit {
    int h;
    TileStep step;
    TilePlace at;
  };

  const AttentionCall& call;
  Shared& shared;
  int b, first_head, part;
  TileStep stays;
  LeftRows<dtype, kE, 1, kKeeps> left;
  LeftRows<dtype, kEv, 1, kKeeps> right;
  float grad[1][2 * kPairs][4], grad_values[1][kKeysStay ? 2 * kValuePairs : 2][4];

  LOWBIT_INLINE int row_of(int i) const { return warp_of_cta() * 16 + lane_of_warp() / 4 + i / 2 * 8; }
  LOWBIT_INLINE int column_of(int n, int i) const { return n * 8 + lane_of_warp() % 4 * 2 + i % 2; }

  // The next visible tile from `visit` on; false after the last.
  LOWBIT_INLINE bool find_next(Visit& visit) const {
    const Tiling& tiling = kKeysStay ? call.q_tiles : call.kv_tiles;
    for (const int end = kKeysStay ? first_head + call.group : first_head + 1; visit.h < end;
         visit.h++, visit.step = TileStep()) {
      while (visit.step.index < static_cast<int>(tiling.count)) {
        const TileStep &q = kKeysStay ? visit.step : stays, &k = kKeysStay ? stays : visit.step;
        if (find_tile(call, b, visit.h, q, k, visit.at)) {
          visit.at.cut |= visit.at.rows < (kKeysStay ? kShape.passing : kRows) ||
                          visit.at.cols < (kKeysStay ? kRows : kShape.passing);
          return true;
        }
        visit.step.next(tiling);
        pass_empty<!kKeysStay>(call, b, visit.h, stays, visit.step);
      }
    }
    return false;
  }

  LOWBIT_INLINE void copy(const Visit& visit, Passing& to) const {
    const int kv_head = visit.h / call.group;
    if constexpr (kKeysStay) {
      to.left.copy(head_rows(call.q, b, visit.h) + visit.at.q0 * call.q.row, call.q.row, visit.at.rows);
      to.right.copy(head_rows(call.grad_out, b, visit.h) + visit.at.q0 * call.grad_out.row, call.grad_out.row,
                    visit.at.rows);
    } else {
      to.left.copy(head_rows(call.k, b, kv_head) + visit.at.k0 * call.k.row, call.k.row, visit.at.cols);
      to.right.copy(head_rows(call.v, b, kv_head) + visit.at.k0 * call.v.row, call.v.row, visit.at.cols);
    }
  }

  LOWBIT_INLINE void copy_staying() const {
    const int begin = stays.begin(kKeysStay ? call.kv_tiles : call.q_tiles),
              size = stays.size(kKeysStay ? call.kv_tiles : call.q_tiles), kv_head = first_head / call.group;
    if constexpr (kKeysStay) {
      shared.left.copy(head_rows(call.k, b, kv_head) + begin * call.k.row, call.k.row, size);
      shared.right.copy(head_rows(call.v, b, kv_head) + begin * call.v.row, call.v.row, size);
    } else {
      shared.left.copy(head_rows(call.q, b, first_head) + begin * call.q.row, call.q.row, size);
      shared.right.copy(head_rows(call.grad_out, b, first_head) + begin * call.grad_out.row, call.grad_out.row, size);
    }
  }

  // Statistics of the queries of this lane's scores: each lane of the warp reads those of one, and shares them.
  LOWBIT_INLINE int64_t read_row(const TilePlace& at) const {
    const int row = kKeysStay ? lane_of_warp() % kShape.passing : warp_of_cta() * 16 + lane_of_warp() % 16;
    return (static_cast<int64_t>(b) * call.heads + at.h) * call.q_tiles.length + at.q0 +
           (row < at.rows ? row : at.rows - 1);
  }
  struct OfScores {  // a number of each query
    static constexpr int kCount = kKeysStay ? 2 * kScores : 2;
    float numbers[kCount];

    LOWBIT_INLINE explicit OfScores(float read) {
#pragma unroll
      for (int j = 0; j < kCount; j++)
        numbers[j] = __shfl_sync(kWarp, read, kKeysStay ? j / 2 * 8 + j % 2 + first_column() : j * 8 + first_row());
    }
    LOWBIT_INLINE float operator()(int n, int i) const { return numbers[kKeysStay ? 2 * n + i % 2 : i / 2]; }
  };

  // Raw products s and gradients dp of probabilities to probabilities, times kProbabilityFactor or 0 where they are
  // dropped, and gradients of raw scores.
  template <bool kCut>
  LOWBIT_INLINE void differentiate(const TilePlace& at, const RowStatistics& read, float (&s)[1][kScores][4],
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
    const OfScores lse(read.lse);
    for_each([&](int n, int i) { p[0][n][i] = power_of_2((p[0][n][i] - lse(n, i)) * kLog2e); });
    if (__any_sync(kWarp, read.has_rest())) {
      const OfScores unit(read.has_rest() ? call.unit[read_row(at)] : 1.0f);
      for_each([&](int n, int i) { p[0][n][i] *= unit(n, i); });
    }
    if constexpr (Mods::kDropout)
      for_each_score<kKeysStay>(at, kept,
                                [&](float& factor, int q, int k) { factor = dropout_factor(call, at, q, k); });
    const OfScores delta(read.delta);
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

  // Finds the sum of the probabilities of each row of large lse, for queries that stay: before its first use.
  LOWBIT_INLINE void find_units() const {
    const int q0 = stays.begin(call.q_tiles), rows = stays.size(call.q_tiles);
    const int64_t head = (static_cast<int64_t>(b) * call.heads + first_head) * call.q_tiles.length + q0;
    if (!any_has_rest(call.statistics + head, rows)) return;
    float lse[2], total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = row_of(2 * half) < rows ? row_of(2 * half) : rows - 1;
      lse[half] = call.statistics[head + row].lse, total[half] = 0;
    }
    copy_staying();
    for (Visit visit{first_head, {}, {}}; find_next(visit); visit.step.next(call.kv_tiles)) {
      copy(visit, shared.passing[0]);
      wait_for_copies();
      __syncthreads();  // keys are there
      float s[1][kScores][4];
      clear(s);
      multiply_rows<dtype, kE>(s, left.rows, shared.passing[0].left.data);
      for_each_score<false>(visit.at, s, [&](float& score, int, int) { score *= call.scale; });
      modify<Mods, false, true>(call, visit.at, s);
#pragma unroll
      for (int n = 0; n < kScores; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[i / 2] += power_of_2((s[0][n][i] - lse[i / 2]) * kLog2e);
      __syncthreads();  // every thread is done with them
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] += __shfl_xor_sync(kWarp, total[half], 1);
      total[half] += __shfl_xor_sync(kWarp, total[half], 2);
      if (call.sink) total[half] += power_of_2((call.sink[first_head] - lse[half]) * kLog2e);
      if (lane_of_warp() % 4 == 0 && row_of(2 * half) < rows)
        call.unit[head + row_of(2 * half)] = __fdiv_rn(1.0f, total[half]);
    }
  }

  LOWBIT_INLINE void run() {
    if constexpr (!kKeysStay && !kCaptured) find_units();
    clear(grad), clear(grad_values);
    Visit next{first_head, {}, {}}, now;
    bool more = find_next(next);
    if (!more) return;
    copy_staying();
    copy(next, shared.passing[0]);
    const int pairs = smaller_pairs(kE / 16, kPairs), value_pairs = smaller_pairs(kEv / 16, kValuePairs);
    for (int stage = 0, first = 1; more; stage = (stage + 1) % kShape.stages, first = 0) {
      now = next;
      wait_for_copies();
      __syncthreads();  // the tile is there, and every thread is done with the one before
      Passing& passing = shared.passing[stage];
      const RowStatistics read = call.statistics[read_row(now.at)];
      float s[1][kScores][4], dp[1][kScores][4];
      if (first) left.load(), right.load();
      left.multiply(s, passing.left.data);
      right.multiply(dp, passing.right.data);
      next.step.next(kKeysStay ? call.q_tiles : call.kv_tiles);
      more = find_next(next);
      if (more) copy(next, shared.passing[(stage + 1) % kShape.stages]);
      if (now.at.cut) differentiate<true>(now.at, read, s, dp);
      else differentiate<false>(now.at, read, s, dp);
      if constexpr (kKeysStay)
        multiply_onto<dtype, kValueStride>(grad_values, s, passing.right.data + part * kValuePairs * 16, value_pairs);
      if constexpr (!kCaptured)
        multiply_onto<dtype, kStride>(grad, dp, passing.left.data + part * kPairs * 16, pairs);
    }
  }
  LOWBIT_INLINE int smaller_pairs(int all, int most) const {  // of this part
    return static_cast<int>(smaller(most, all - part * most));
  }

  template <int kColumns>
  LOWBIT_INLINE void store(const HeadRows& to, const float (&from)[1][kColumns][4], int h, int first, int columns,
                           float scale) const {
    const Tiling& tiling = kKeysStay ? call.kv_tiles : call.q_tiles;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      if (row_of(i) >= stays.size(tiling)) continue;
#pragma unroll
      for (int n = 0; n < kColumns; n++)
        if (first + n * 8 < columns)
          store_pair<dtype>(to, dtype, b, h, stays.begin(tiling) + row_of(i), first + column_of(n, 0),
                            from[0][n][i] * scale, from[0][n][i + 1] * scale);
    }
  }
  LOWBIT_INLINE void finish() const {
    const int h = kKeysStay ? first_head / call.group : first_head;
    store(kKeysStay ? call.grad_k : call.grad_q, grad, h, part * kPairs * 16, kE, call.scale);
    if constexpr (kKeysStay)
      store(call.grad_v, grad_values, h, part * kValuePairs * 16, kEv,
            (Mods::kDropout ? call.kept : 1.0f) / kProbabilityFactor);
  }
};

// Under causality the first keys and the last queries have most to do.
template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay, bool kCaptured = false>
LOWBIT_INLINE void attention_backward(const AttentionCall& call) {
  using B = Backward<dtype, kE, kEv, Mods, kKeysStay, kCaptured>;
  LOWBIT_DYNAMIC_SHARED(typename B::Shared, shared);
  const Tiling& tiling = kKeysStay ? call.kv_tiles : call.q_tiles;
  const int each = kKeysStay ? call.heads / call.group : call.heads, parts = kCaptured ? 1 : B::kShape.parts;
  const int task = static_cast<int>(blockIdx.x) / parts, heads = call.batch * each, turn = task / heads;
  const int index = kKeysStay ? turn : static_cast<int>(tiling.count) - 1 - turn;
  B backward{.call = call, .shared = shared, .b = task % heads / each,
             .first_head = task % heads % each * (kKeysStay ? call.group : 1),
             .part = static_cast<int>(blockIdx.x) % parts,
             .stays = TileStep::at(tiling, index), .left = {shared.left.data + warp_of_cta() * 16 * B::kStride},
             .right = {shared.right.data + warp_of_cta() * 16 * B::kValueStride}};
  backward.run();
  if constexpr (!kCaptured) backward.finish();
  check_fault<Mods>(call);
}

}  // namespace lowbit::cuda
