// SPDX-License-Identifier: Apache-2.0
// Forward: a CTA has a tile of queries of one head and passes over the keys that it may see with a running softmax. The
// keys and values of the next tile are on their way meanwhile. Scores and probabilities stay in registers.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

template <DType dtype, int kE, int kEv, class Mods>
struct Forward {
  static constexpr ForwardShape kShape = forward_shape(kE, kEv, Mods::kGathers);
  static constexpr int kM = kShape.row_tiles, kScores = kShape.kv_tile / 8, kColumns = kEv / 8;
  static constexpr int kStride = kE + kRowPad;

  struct Shared {
    SharedRows<kShape.q_tile(), kE> q;
    struct Passing {
      SharedRows<kShape.kv_tile, kE> keys;
      SharedRows<kShape.kv_tile, kEv> values;
    } passing[kShape.kStages];
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const AttentionCall& call;
  Shared& shared;
  const uint16_t *keys, *values;
  LeftRows<dtype, kE, kM, kShape.keeps_q> q;
  float factor;           // exponent_factor
  // Of each row: the score that powers are relative to, and the sum of those that this lane saw.
  float out[kM][kColumns][4], base[kM][2], total[kM][2];

  LOWBIT_INLINE int row() const { return warp_of_cta() * kM * 16 + lane_of_warp() / 4; }  // the first of this lane

  LOWBIT_INLINE void start() {
    clear(out);
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) base[m][i] = minus_infinity(), total[m][i] = 0;
  }

  // The base of every row becomes its largest score so far, and what was relative to the one before follows.
  LOWBIT_INLINE void rebase(const float (&largest)[kM][2]) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = fmaxf(base[m][half], largest[m][half]);
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
        const float shrink = base[m][half] == minus_infinity() ? 0.0f : power_of_2((base[m][half] - top) * factor);
        base[m][half] = top, total[m][half] *= shrink;
#pragma unroll
        for (int n = 0; n < kColumns; n++) out[m][n][2 * half] *= shrink, out[m][n][2 * half + 1] *= shrink;
      }
  }

  // Scores to powers of e, and their sums. A base stays until a power exceeds the room for it, which is seldom.
  LOWBIT_INLINE void softmax(float (&s)[kM][kScores][4]) {
    const float room = call.max_scores ? -1.0f : 8.0f;  // of an exponent of 2; -1: bases are the largest scores
    float largest[kM][2];
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = minus_infinity();
#pragma unroll
        for (int n = 0; n < kScores; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        exceeds |= top > base[m][half] && !((top - base[m][half]) * factor <= room);
        largest[m][half] = top;
      }
    if (__any_sync(kWarp, exceeds)) rebase(largest);
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

  // The factor of what stays comes at the end: powers may be 2^8, and float16 ends at 2^16.
  LOWBIT_INLINE void drop(const TilePlace& at, float (&s)[kM][kScores][4]) const {
    if constexpr (Mods::kDropout)
      for_each_score<false>(at, s, [&](float& p, int q, int k) {
        if (dropout_factor(call, at, q, k) == 0) p = 0;
      });
  }

  // The next tile of keys from `step` on that is visible; false after the last.
  LOWBIT_INLINE bool find_next(int b, int h, const TileStep& q_step, TileStep& step, TilePlace& at) const {
    while (step.index < static_cast<int>(call.kv_tiles.count)) {
      if (find_tile(call, b, h, q_step, step, at)) {
        at.cut |= at.cols < kShape.kv_tile || (asks<Mods>() && at.rows < kShape.q_tile());
        return true;
      }
      step.next(call.kv_tiles);
      pass_empty<true>(call, b, h, q_step, step);
    }
    return false;
  }

  // A tile of keys that is at most eight before the window of these queries, of a call without a block mask, as those
  // with a window are. Its number as a quotient spilled 8 bytes (NVRTC 13.5, sm_90a, head dims of 128).
  LOWBIT_INLINE TileStep first_keys(const TileStep& q_step) const {
    constexpr int kAtOnce = 8;
    const int seen = q_step.begin(call.q_tiles) + call.position - call.window + 1;
    TileStep step;
    while (call.window > 0 && (step.index + kAtOnce) * kShape.kv_tile <= seen)
      step.index += kAtOnce, step.within += kAtOnce;
    return step;
  }

  LOWBIT_INLINE void copy(const TilePlace& at, typename Shared::Passing& to) const {
    to.keys.copy(keys + at.k0 * call.k.row, call.k.row, at.cols);
    to.values.copy(values + at.k0 * call.v.row, call.v.row, at.cols);
  }

  LOWBIT_INLINE void run(int b, int h, const TileStep& q_step) {
    TileStep step = first_keys(q_step);
    TilePlace now, next;
    bool more = find_next(b, h, q_step, step, next);
    if (more) copy(next, shared.passing[0]);
    for (int stage = 0, first = 1; more; stage = (stage + 1) % kShape.kStages, first = 0) {
      now = next;
      wait_for_copies();
      __syncthreads();  // the tile is there, and every thread is done with the one before
      if (first) q.load();
      float s[kM][kScores][4];
      q.multiply(s, shared.passing[stage].keys.data);
      step.next(call.kv_tiles);
      more = find_next(b, h, q_step, step, next);
      if (more) copy(next, shared.passing[(stage + 1) % kShape.kStages]);
      if constexpr (!Mods::kFolds)
        for_each_score<false>(now, s, [&](float& score, int, int) { score *= call.scale; });
      if (now.cut) modify<Mods, false, true>(call, now, s);
      else modify<Mods, false, false>(call, now, s);
      softmax(s);
      drop(now, s);
      multiply_onto<dtype, kEv + kRowPad>(out, s, shared.passing[stage].values.data, kEv / 16);
    }
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

template <DType dtype, int kE, int kEv, class Mods>
LOWBIT_INLINE void attention_forward(const AttentionCall& call) {
  using F = Forward<dtype, kE, kEv, Mods>;
  LOWBIT_DYNAMIC_SHARED(typename F::Shared, shared);
  const auto [b, h, q_step, q0, rows] = query_tile(call);
  const int kv_head = h / call.group, first = warp_of_cta() * F::kM * 16;
  shared.q.copy(head_rows(call.q, b, h) + q0 * call.q.row, call.q.row, rows);
  F forward{.call = call, .shared = shared, .keys = head_rows(call.k, b, kv_head),
            .values = head_rows(call.v, b, kv_head), .q = {shared.q.data + first * F::kStride},
            .factor = exponent_factor<Mods>(call)};
  forward.start();
  forward.run(b, h, q_step);
  forward.finish(b, h, q0, q0 + rows);
  check_fault<Mods>(call);
}

}  // namespace lowbit::cuda
