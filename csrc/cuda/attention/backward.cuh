// SPDX-License-Identifier: Apache-2.0
// The backward, from q, k, v, grad_out, lse and D = sum of grad_out * out - grad_lse, per tile of scores:
//   p = exp(s - lse), times a factor (unit) that makes them add up to 1 if lse is large (a mask of finfo.min)
//   dp = dropout(grad_out v^T);  ds = p (dp - D), through score_mod back to the raw scores
//   grad_v += dropout(p)^T grad_out;  grad_k += scale * ds^T q;  grad_q += scale * ds k
// Two passes, without additions across CTAs: in one a CTA keeps a tile of keys and values and loops over queries and
// grad_out, for the heads of a group in turn; in the other it keeps queries and grad_out and loops over keys and
// values. Scores have a row for each row that stays, so that they are the left factor of the next product as computed.
#pragma once

#include "cuda/attention/pass.cuh"

namespace lowbit::cuda {

// kCaptured: a pass only for the gradients of captured tensors, which Mods::gradient accumulates.
template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay, bool kCaptured>
struct Backward {
  static constexpr BackwardShape kShape = backward_shape(kE, kEv, Mods::kGathers);
  static constexpr int kRows = kShape.kStaying, kScores = kShape.passing / 8;
  static constexpr int kPairs = (kE / 16 + kShape.parts - 1) / kShape.parts,  // pairs of 16 columns per CTA
                       kValuePairs = (kEv / 16 + kShape.parts - 1) / kShape.parts;
  static constexpr int kStride = kE + kRowPad, kValueStride = kEv + kRowPad;
  // Rows that are also kept in registers.
  static constexpr bool kKeeps = !kKeysStay && Mods::kGathers == Gathers::none && kE + kEv <= 256;

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

  using PassOf = Pass<dtype, kRows, kShape.passing, Mods, kKeysStay>;
  using Visit = typename PassOf::Visit;

  const AttentionCall& call;
  Shared& shared;
  int part;
  PassOf pass;
  LeftRows<dtype, kE, 1, kKeeps> left;
  LeftRows<dtype, kEv, 1, kKeeps> right;
  float grad[1][2 * kPairs][4], grad_values[1][kKeysStay ? 2 * kValuePairs : 2][4];

  LOWBIT_INLINE void copy(const Visit& visit, Passing& to) const {
    pass.passing_left(visit).copy_to(to.left), pass.passing_right(visit).copy_to(to.right);
  }
  LOWBIT_INLINE void copy_staying() const {
    pass.staying_left().copy_to(shared.left), pass.staying_right().copy_to(shared.right);
  }

  // Computes the sum of probabilities of each row with a large lse, for queries that stay, before its first use.
  LOWBIT_INLINE void find_units() const {
    const int q0 = pass.stays.begin(call.q_tiles), rows = pass.stays.size(call.q_tiles);
    const int64_t head = (static_cast<int64_t>(pass.b) * call.heads + pass.first_head) * call.q_tiles.length + q0;
    if (!any_has_rest(call.statistics + head, rows)) return;
    float lse[2], total[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = pass.row_of(2 * half) < rows ? pass.row_of(2 * half) : rows - 1;
      lse[half] = call.statistics[head + row].lse, total[half] = 0;
    }
    copy_staying();
    for (Visit visit{pass.first_head, {}, {}}; pass.find_next(visit); visit.step.next(call.kv_tiles)) {
      copy(visit, shared.passing[0]);
      wait_for_copies();
      __syncthreads();  // keys have arrived
      float s[1][kScores][4];
      clear(s);
      multiply_rows<dtype, kE>(s, left.rows, shared.passing[0].left.data);
      for_each_score<false>(visit.at, s, [&](float& score, int, int) { score *= call.scale; });
      modify<Mods, false, true>(call, visit.at, s);
#pragma unroll
      for (int n = 0; n < kScores; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) total[i / 2] += power_of_2((s[0][n][i] - lse[i / 2]) * kLog2e);
      __syncthreads();  // all threads are done with them
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      total[half] += __shfl_xor_sync(kWarp, total[half], 1);
      total[half] += __shfl_xor_sync(kWarp, total[half], 2);
      if (call.sink) total[half] += power_of_2((call.sink[pass.first_head] - lse[half]) * kLog2e);
      if (lane_of_warp() % 4 == 0 && pass.row_of(2 * half) < rows)
        call.unit[head + pass.row_of(2 * half)] = __fdiv_rn(1.0f, total[half]);
    }
  }

  LOWBIT_INLINE void run() {
    if constexpr (!kKeysStay && !kCaptured) find_units();
    clear(grad), clear(grad_values);
    Visit next{pass.first_head, {}, {}}, now;
    bool more = pass.find_next(next);
    if (!more) return;
    copy_staying();
    copy(next, shared.passing[0]);
    const int pairs = smaller_pairs(kE / 16, kPairs), value_pairs = smaller_pairs(kEv / 16, kValuePairs);
    for (int stage = 0, first = 1; more; stage = (stage + 1) % kShape.stages, first = 0) {
      now = next;
      wait_for_copies();
      __syncthreads();  // the tile has arrived, and all threads are done with the one before
      Passing& passing = shared.passing[stage];
      const typename PassOf::StatisticsOfLanes statistics{call.statistics[pass.row_of_lane(now.at)]};
      float s[1][kScores][4], dp[1][kScores][4];
      if (first) left.load(), right.load();
      left.multiply(s, passing.left.data);
      right.multiply(dp, passing.right.data);
      next.step.next(pass.passing_tiles());
      more = pass.find_next(next);
      if (more) copy(next, shared.passing[(stage + 1) % kShape.stages]);
      if (now.at.cut) pass.template differentiate<true>(now.at, statistics, s, dp);
      else pass.template differentiate<false>(now.at, statistics, s, dp);
      if constexpr (kKeysStay)
        multiply_onto<dtype, kValueStride>(grad_values, s, passing.right.data + part * kValuePairs * 16, value_pairs);
      if constexpr (!kCaptured)
        multiply_onto<dtype, kStride>(grad, dp, passing.left.data + part * kPairs * 16, pairs);
    }
  }
  LOWBIT_INLINE int smaller_pairs(int all, int most) const {  // pairs in this part
    return static_cast<int>(smaller(most, all - part * most));
  }

  LOWBIT_INLINE void finish() const {
    pass.store(grad, kE, grad_values, kEv, part * kPairs * 16, part * kValuePairs * 16);
  }
};

template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay, bool kCaptured = false>
LOWBIT_INLINE void attention_backward(const AttentionCall& call) {
  using B = Backward<dtype, kE, kEv, Mods, kKeysStay, kCaptured>;
  LOWBIT_DYNAMIC_SHARED(typename B::Shared, shared);
  const int parts = kCaptured ? 1 : B::kShape.parts;
  B backward{.call = call, .shared = shared, .part = static_cast<int>(blockIdx.x) % parts,
             .pass = pass_of<typename B::PassOf, kKeysStay>(call, static_cast<int>(blockIdx.x) / parts),
             .left = {shared.left.data + warp_of_cta() * 16 * B::kStride},
             .right = {shared.right.data + warp_of_cta() * 16 * B::kValueStride}};
  backward.run();
  if constexpr (!kCaptured) backward.finish();
  check_fault<Mods>(call);
}

// The first part of the pass over queries, for a pass of another kernel.
template <DType dtype, int kE, int kEv, class Mods>
LOWBIT_INLINE void attention_units(const AttentionCall& call) {
  using B = Backward<dtype, kE, kEv, Mods, false, false>;
  LOWBIT_DYNAMIC_SHARED(typename B::Shared, shared);
  const B backward{.call = call, .shared = shared, .part = 0,
                   .pass = pass_of<typename B::PassOf, false>(call, static_cast<int>(blockIdx.x)),
                   .left = {shared.left.data + warp_of_cta() * 16 * B::kStride}, .right = {}};
  backward.find_units();
}

}  // namespace lowbit::cuda
