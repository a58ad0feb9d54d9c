// SPDX-License-Identifier: Apache-2.0
// The forward: a CTA has a tile of queries of one head, with a running softmax over the keys that it may see. Meanwhile
// the next tile of keys and values is copied.
#pragma once

#include "cuda/attention/softmax.cuh"

namespace lowbit::cuda {

template <DType dtype, int kE, int kEv, class Mods>
struct Forward {
  static constexpr ForwardShape kShape = forward_shape(kE, kEv, Mods::kGathers);
  static constexpr int kM = kShape.row_tiles, kScores = kShape.kv_tile / 8, kStride = kE + kRowPad;

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
  RunningSoftmax<dtype, kEv, kM, kScores, Mods> softmax;

  LOWBIT_INLINE bool find_next(int b, int h, const TileStep& q_step, TileStep& step, TilePosition& at) const {
    return find_next_tile<Mods, kShape.q_tile(), kShape.kv_tile>(call, b, h, q_step, step, at);
  }

  LOWBIT_INLINE void copy(const TilePosition& at, typename Shared::Passing& to) const {
    to.keys.copy(keys + at.k0 * call.k.row, call.k.row, at.cols);
    to.values.copy(values + at.k0 * call.v.row, call.v.row, at.cols);
  }

  LOWBIT_INLINE void run(int b, int h, const TileStep& q_step) {
    TileStep step = first_keys<kShape.kv_tile>(call, q_step);
    TilePosition now, next;
    bool more = find_next(b, h, q_step, step, next);
    if (more) copy(next, shared.passing[0]);
    for (int stage = 0, first = 1; more; stage = (stage + 1) % kShape.kStages, first = 0) {
      now = next;
      wait_for_copies();
      __syncthreads();  // the tile has arrived, and all threads are done with the one before
      if (first) q.load();
      float s[kM][kScores][4], largest[kM][2];
      q.multiply(s, shared.passing[stage].keys.data);
      step.next(call.kv_tiles);
      more = find_next(b, h, q_step, step, next);
      if (more) copy(next, shared.passing[(stage + 1) % kShape.kStages]);
      softmax.modify_scores(now, s);
      if (softmax.exceeds(s, largest))
        softmax.rebase(largest, [&](int m, int half, float by) { softmax.shrink_result(m, half, by); });
      softmax.powers(s);
      softmax.drop(now, s);
      multiply_onto<dtype, kEv + kRowPad>(softmax.out, s, shared.passing[stage].values.data, kEv / 16);
    }
  }
};

template <DType dtype, int kE, int kEv, class Mods>
LOWBIT_INLINE void attention_forward(const AttentionCall& call) {
  using F = Forward<dtype, kE, kEv, Mods>;
  LOWBIT_DYNAMIC_SHARED(typename F::Shared, shared);
  const auto [b, h, q_step, q0, rows] = query_tile(call, static_cast<int>(blockIdx.x));
  const int kv_head = h / call.group, first = warp_of_cta() * F::kM * 16;
  shared.q.copy(head_rows(call.q, b, h) + q0 * call.q.row, call.q.row, rows);
  F forward{.call = call, .shared = shared, .keys = head_rows(call.k, b, kv_head),
            .values = head_rows(call.v, b, kv_head), .q = {shared.q.data + first * F::kStride},
            .softmax = {.call = call, .factor = exponent_factor<Mods>(call)}};
  forward.softmax.start();
  forward.run(b, h, q_step);
  forward.softmax.finish(b, h, q0, q0 + rows);
  check_fault<Mods>(call);
}

}  // namespace lowbit::cuda
