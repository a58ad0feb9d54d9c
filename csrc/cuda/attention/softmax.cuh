// SPDX-License-Identifier: Apache-2.0
// The running softmax of the forward: the state of a CTA's queries over the tiles of keys so far, and its update with
// the next tile. A warp has 16 kM queries; scores, probabilities and accumulators stay in registers.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

// A tile of keys at most eight tiles before the window of these queries, for a call without a block mask, as all with a
// window are. An exact quotient spilled 8 bytes (NVRTC 13.5, sm_90a, head dims of 128).
template <int kKvTile, class Call>
LOWBIT_INLINE TileStep first_keys(const Call& call, const TileStep& q_step) {
  constexpr int kAtOnce = 8;
  const int seen = q_step.begin(call.q_tiles) + call.position - call.window + 1;
  TileStep step;
  while (call.window > 0 && (step.index + kAtOnce) * kKvTile <= seen) step.index += kAtOnce, step.within += kAtOnce;
  return step;
}

// The next tile of keys from `step` on that some query of a tile sees; false after the last.
template <class Mods, int kQTile, int kKvTile, class Call>
LOWBIT_INLINE bool find_next_tile(const Call& call, int b, int h, const TileStep& q_step, TileStep& step,
                                  TilePosition& at) {
  while (step.index < static_cast<int>(call.kv_tiles.count)) {
    if (find_tile(call, b, h, q_step, step, at)) {
      at.cut |= at.cols < kKvTile || (asks<Mods>() && at.rows < kQTile);
      return true;
    }
    step.next(call.kv_tiles);
    pass_empty<true>(call, b, h, q_step, step);
  }
  return false;
}

template <DType dtype, int kEv, int kM, int kScores, class Mods, class Call = AttentionCall>
struct RunningSoftmax {
  static constexpr int kColumns = kEv / 8;

  const Call& call;
  float factor;  // exponent_factor
  // Per row: the score that powers are relative to, and the sum of this lane's powers.
  float out[kM][kColumns][4], base[kM][2], total[kM][2];

  LOWBIT_INLINE int row() const { return warp_of_cta() * kM * 16 + lane_of_warp() / 4; }  // the first of this lane

  LOWBIT_INLINE void start() { clear(out), start_rows(); }
  LOWBIT_INLINE void start_rows() {  // leaves out unchanged
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) base[m][i] = minus_infinity(), total[m][i] = 0;
  }

  // Sets the base of each row to its largest score so far. follow(m, half, by): rescales by the change.
  template <class Follow>
  LOWBIT_INLINE void rebase(const float (&largest)[kM][2], Follow follow) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = fmaxf(base[m][half], largest[m][half]);
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
        const float shrink = base[m][half] == minus_infinity() ? 0.0f : power_of_2((base[m][half] - top) * factor);
        base[m][half] = top, total[m][half] *= shrink;
        follow(m, half, shrink);
      }
  }
  LOWBIT_INLINE void shrink_result(int m, int half, float by) {
#pragma unroll
    for (int n = 0; n < kColumns; n++) out[m][n][2 * half] *= by, out[m][n][2 * half + 1] *= by;
  }

  // Whether bases must be raised before the powers of these scores are taken. A base stays until a power exceeds a
  // limit, which is rare.
  LOWBIT_INLINE bool exceeds(const float (&s)[kM][kScores][4], float (&largest)[kM][2]) const {
    const float room = call.max_scores ? -1.0f : 8.0f;  // in powers of 2; -1: bases are always the largest scores
    bool any = false;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = minus_infinity();
#pragma unroll
        for (int n = 0; n < kScores; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        any |= top > base[m][half] && !((top - base[m][half]) * factor <= room);
        largest[m][half] = top;
      }
    return __any_sync(kWarp, any);
  }

  // Turns scores into powers of e, and sums them.
  LOWBIT_INLINE void powers(float (&s)[kM][kScores][4]) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float from = base[m][half] == minus_infinity() ? 0.0f : base[m][half];
#pragma unroll
        for (int n = 0; n < kScores; n++)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++) {
            s[m][n][i] = power_of_2((s[m][n][i] - from) * factor);
            total[m][half] += s[m][n][i];
          }
      }
  }

  // The factor of kept probabilities is applied at the end: powers may be 2^8, and float16 ends at 2^16.
  LOWBIT_INLINE void drop(const TilePosition& at, float (&s)[kM][kScores][4]) const {
    if constexpr (Mods::kDropout)
      for_each_score<false>(at, s, [&](float& p, int q, int k) {
        if (dropout_factor(call, at, q, k) == 0) p = 0;
      });
  }

  // Turns products of queries and keys into the scores of the softmax.
  LOWBIT_INLINE void modify_scores(const TilePosition& at, float (&s)[kM][kScores][4]) const {
    if constexpr (!Mods::kFolds)
      for_each_score<false>(at, s, [&](float& score, int, int) { score *= call.scale; });
    if (at.cut) modify<Mods, false, true>(call, at, s);
    else modify<Mods, false, false>(call, at, s);
  }

  LOWBIT_INLINE void finish(int b, int h, int q0, int end) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float sum = total[m][half];
        sum += __shfl_xor_sync(kWarp, sum, 1);
        sum += __shfl_xor_sync(kWarp, sum, 2);
        const int q_row = q0 + row() + m * 16 + half * 8;
        if (q_row < end) store_row(b, h, q_row, m, half, sum);
      }
  }

  LOWBIT_INLINE void store_row(int b, int h, int q_row, int m, int half, float sum) const {
    const int64_t at = (static_cast<int64_t>(b) * call.heads + h) * call.q_tiles.length + q_row;
    float top = Mods::kFolds ? base[m][half] * call.scale : base[m][half], scale = 1;
    if (base[m][half] == minus_infinity()) top = minus_infinity();
    const bool writes = lane_of_warp() % 4 == 0;
    if (call.max_scores && writes) call.max_scores[at] = sum != sum && top - top == 0 ? sum : top;
    if (call.sink) {
      const float sink = call.sink[h], base = sink > top ? sink : top;
      if (base != minus_infinity()) {
        scale = power_of_2((top - base) * kLog2e);
        sum = sum * scale + power_of_2((sink - base) * kLog2e);
        top = base;
      }
    }
    if (call.lse && writes) call.lse[at] = top + logf(sum);
    const float by = sum == 0 ? 0.0f : __fdiv_rn(scale, sum) * (Mods::kDropout ? call.kept : 1.0f);
#pragma unroll
    for (int n = 0; n < kColumns; n++)
      store_pair<dtype>(call.out, call.out_dtype, b, h, q_row, n * 8 + lane_of_warp() % 4 * 2,
                        out[m][n][2 * half] * by, out[m][n][2 * half + 1] * by);
  }
};

}  // namespace lowbit::cuda
