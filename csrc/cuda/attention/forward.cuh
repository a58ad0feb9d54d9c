// SPDX-License-Identifier: Apache-2.0
// Forward: a CTA has a tile of queries of one head and passes over the keys that it may see with a running softmax. The
// values of a tile are on their way while its keys are multiplied, and the next keys while its values are. Scores and
// probabilities stay in registers.
#pragma once

#include "cuda/attention/scores.cuh"

namespace lowbit::cuda {

template <DType dtype, int kE, int kEv, class Mods>
struct Forward {
  static constexpr ForwardShape kShape = forward_shape(kE, kEv, Mods::kFolds);
  static constexpr int kM = kShape.row_tiles, kScores = kShape.kv_tile / 8, kColumns = kEv / 8;
  static constexpr int kStride = kE + kRowPad;

  struct Shared {
    SharedRows<kShape.q_tile(), kE> q;
    SharedRows<kShape.kv_tile, kE> keys;
    SharedRows<kShape.kv_tile, kEv> values;
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const AttentionCall& call;
  Shared& shared;
  const uint16_t *keys, *values;
  const uint16_t* own_q;  // of this warp
  float factor;           // exponent_factor
  float out[kM][kColumns][4], largest[kM][2], total[kM][2];
  uint32_t q[kShape.keeps_q ? kE / 16 : 1][kM][4];

  LOWBIT_INLINE int row() const { return warp_of_cta() * kM * 16 + lane_of_warp() / 4; }  // the first of this lane

  LOWBIT_INLINE void start() {
    clear(out);
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int i = 0; i < 2; i++) largest[m][i] = minus_infinity(), total[m][i] = 0;
  }

  LOWBIT_INLINE void load_q() {
    if constexpr (kShape.keeps_q)
#pragma unroll
      for (int k = 0; k < kE / 16; k++)
#pragma unroll
        for (int m = 0; m < kM; m++) load_rows<kStride>(q[k][m], own_q + m * 16 * kStride, k * 16);
  }

  LOWBIT_INLINE void multiply_keys(float (&s)[kM][kScores][4]) const {
    clear(s);
    if constexpr (kShape.keeps_q) {
#pragma unroll
      for (int k = 0; k < kE / 16; k++) multiply_step<dtype, kStride>(s, q[k], shared.keys.data, k * 16);
    } else {
      multiply_rows<dtype, kE>(s, own_q, shared.keys.data);
    }
  }

  // body(score, query, key)
  template <class Body>
  LOWBIT_INLINE void for_each_score(const TilePlace& at, float (&s)[kM][kScores][4], Body body) const {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int n = 0; n < kScores; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          body(s[m][n][i], at.q0 + row() + m * 16 + i / 2 * 8, at.k0 + lane_of_warp() % 4 * 2 + n * 8 + i % 2);
  }

  LOWBIT_INLINE void modify(const TilePlace& at, float (&s)[kM][kScores][4]) const {
    if (Mods::kFolds && !at.cut) return;
    for_each_score(at, s, [&](float& score, int q, int k) { score = modified<Mods>(call, at, score, q, k); });
  }

  // Scores to powers of e, sums and the result in relation to the largest score so far.
  LOWBIT_INLINE void softmax(float (&s)[kM][kScores][4]) {
#pragma unroll
    for (int m = 0; m < kM; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        float top = largest[m][half];
#pragma unroll
        for (int n = 0; n < kScores; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
        const float base = top == minus_infinity() ? 0.0f : top;
        const float shrink = power_of_2((largest[m][half] - base) * factor);
        largest[m][half] = top, total[m][half] *= shrink;
#pragma unroll
        for (int n = 0; n < kColumns; n++) out[m][n][2 * half] *= shrink, out[m][n][2 * half + 1] *= shrink;
#pragma unroll
        for (int n = 0; n < kScores; n++)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; i++) {
            s[m][n][i] = power_of_2((s[m][n][i] - base) * factor);
            total[m][half] += s[m][n][i];
          }
      }
  }

  LOWBIT_INLINE void drop(const TilePlace& at, float (&s)[kM][kScores][4]) const {
    if constexpr (Mods::kDropout)
      for_each_score(at, s, [&](float& p, int q, int k) { p *= dropout_factor(call, at, q, k); });
  }

  // The next tile of keys from `step` on that is visible; false after the last.
  LOWBIT_INLINE bool find_next(int b, int h, const TileStep& q_step, TileStep& step, TilePlace& at) const {
    for (; step.index < static_cast<int>(call.kv_tiles.count); step.next(call.kv_tiles)) {
      if (!find_tile(call, b, h, q_step, step, at)) continue;
      at.cut |= at.cols < kShape.kv_tile;
      return true;
    }
    return false;
  }

  LOWBIT_INLINE void run(int b, int h, const TileStep& q_step) {
    TileStep step;
    TilePlace now, next;
    bool more = find_next(b, h, q_step, step, next);
    if (more) shared.keys.copy(keys + next.k0 * call.k.row, call.k.row, next.cols);
    for (bool first = true; more; first = false) {
      now = next;
      wait_for_copies();
      __syncthreads();  // keys are there, and every thread is done with the values before
      shared.values.copy(values + now.k0 * call.v.row, call.v.row, now.cols);
      if (first) load_q();
      float s[kM][kScores][4];
      multiply_keys(s);
      wait_for_copies();
      __syncthreads();  // values are there, and every thread is done with the keys
      step.next(call.kv_tiles);
      more = find_next(b, h, q_step, step, next);
      if (more) shared.keys.copy(keys + next.k0 * call.k.row, call.k.row, next.cols);
      modify(now, s);
      softmax(s);
      drop(now, s);
      multiply_onto<dtype, kEv + kRowPad>(out, s, shared.values.data, kEv / 16);
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
    float top = Mods::kFolds ? largest[m][half] * call.scale : largest[m][half], scale = 1;
    if (largest[m][half] == minus_infinity()) top = minus_infinity();
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
    const float by = sum == 0 ? 0.0f : __fdiv_rn(scale, sum);
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
            .values = head_rows(call.v, b, kv_head), .own_q = shared.q.data + first * F::kStride,
            .factor = exponent_factor<Mods>(call)};
  forward.start();
  forward.run(b, h, q_step);
  forward.finish(b, h, q0, q0 + rows);
  check_fault<Mods>(call);
}

}  // namespace lowbit::cuda
