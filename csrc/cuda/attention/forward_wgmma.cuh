// SPDX-License-Identifier: Apache-2.0
// The forward on compute capability 9.0, with warpgroup products. A CTA has 128 queries of one head at a time, 64 per
// warpgroup; scores are laid out as by mma.sync, so that mods and the softmax are the same code. A producer warpgroup
// copies tiles of keys and values to a ring in shared memory, as lines; warpgroups wait for its stages, not for each
// other. The product of queries and keys of one tile and that of probabilities and values of the tile before are issued
// together: during the softmax of one tile, the tensor cores multiply the values of the other, and run the products of
// the other warpgroup.
#pragma once

#include "cuda/attention/matrices.cuh"
#include "cuda/attention/softmax.cuh"

namespace lowbit::cuda {

template <DType dtype, int kE, int kEv, class Mods, class Call>
struct WgmmaForward {
  static constexpr WgmmaForwardShape kShape =
      wgmma_forward_shape(kE, kEv, Mods::kGathers, Call::kHasPosition);
  static constexpr int kKvTile = kShape.kv_tile, kScores = kKvTile / 8, kStages = kShape.stages;
  using Keys = SharedLines<kKvTile, kE>;
  using Values = SharedLines<kKvTile, kEv>;
  using Softmax = RunningSoftmax<dtype, kEv, 1, kScores, Mods, Call>;

  struct Shared {
    struct Stage {
      Keys keys;
      Values values;
    } ring[kStages];
    RingBarriers<kStages> barriers;
  };
  static_assert(sizeof(Shared) == kShape.bytes() && kStages >= 2);

  const Call& call;
  Shared& shared;
  int b, h;
  TileStep q_step;
  int q0, rows;

  // The tiles of keys that a warp passes, and the stage of the next one.
  struct Passing {
    RingPlace<kStages>& place;
    TileStep step;
    TilePosition at{};
    bool more = false;
  };
  LOWBIT_INLINE Passing first(RingPlace<kStages>& place) const {
    Passing tile{.place = place, .step = first_keys<kKvTile>(call, q_step)};
    find(tile);
    return tile;
  }
  LOWBIT_INLINE void find(Passing& tile) const {
    tile.more = find_next_tile<Mods, kShape.q_tile(), kKvTile>(call, b, h, q_step, tile.step, tile.at);
  }
  LOWBIT_INLINE void go_on(Passing& tile) const {
    tile.place.go_on();
    tile.step.next(call.kv_tiles);
    find(tile);
  }

  LOWBIT_INLINE void copy_all(RingPlace<kStages>& place) const {
    const int kv_head = h / call.group;
    const uint16_t *keys = head_rows(call.k, b, kv_head), *values = head_rows(call.v, b, kv_head);
    for (Passing tile = first(place); tile.more; go_on(tile)) {
      wait_for(shared.barriers.empty[tile.place.stage], tile.place.phase ^ 1);
      shared.ring[tile.place.stage].keys.copy(keys + tile.at.k0 * call.k.row, call.k.row, tile.at.cols);
      shared.ring[tile.place.stage].values.copy(values + tile.at.k0 * call.v.row, call.v.row, tile.at.cols);
      arrive_with_copies(shared.barriers.full[tile.place.stage]);
    }
  }

  using Queries = uint32_t[kE / 16][4];
  using Powers = uint32_t[kKvTile / 16][4];

  // Queries as the first factor; rows past the end repeat the last one, and are not stored.
  LOWBIT_INLINE void load(Queries& q) const {
    const uint16_t* from = head_rows(call.q, b, h) + q0 * call.q.row + lane_of_warp() % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = warp_of_cta() * 16 + half * 8 + lane_of_warp() / 4;
      const uint16_t* of_row = from + (row < rows ? row : rows - 1) * call.q.row;
#pragma unroll
      for (int k = 0; k < kE / 16; k++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          q[k][2 * i + half] = computed(*reinterpret_cast<const uint32_t*>(of_row + k * 16 + i * 8));
    }
  }

  LOWBIT_INLINE void wait_for_tile(const Passing& tile) const {
    wait_for(shared.barriers.full[tile.place.stage], tile.place.phase);
    show_to_products();
  }
  LOWBIT_INLINE void begin_scores(const Passing& tile, const Queries& q, float (&s)[1][kScores][4]) const {
    const Keys& keys = shared.ring[tile.place.stage].keys;
    begin_products();
#pragma unroll
    for (int k = 0; k < kE / 16; k++)
      multiply_by_lines<dtype>(s[0], q[k], keys.at(0, k * 16), k > 0);
    commit_products();
  }
  LOWBIT_INLINE void begin_result(int stage, const Powers& p, bool adds, Softmax& softmax) const {
    const Values& values = shared.ring[stage].values;
    begin_products();
#pragma unroll
    for (int k = 0; k < kKvTile / 16; k++)
      multiply_by_lines_of_k<dtype, Values::kPanelStep>(softmax.out[0], p[k], values.at(k * 16, 0), k > 0 || adds);
    commit_products();
  }

  // Turns products of queries and keys into powers; returns whether the result so far must be rescaled.
  LOWBIT_INLINE bool make_powers(const TilePosition& at, Softmax& softmax, float (&s)[1][kScores][4],
                                 float (&shrink)[2]) const {
    hold(s[0]);
    softmax.modify_scores(at, s);
    float largest[1][2];
    const bool moves = softmax.exceeds(s, largest);
    if (moves) softmax.rebase(largest, [&](int, int half, float by) { shrink[half] = by; });
    softmax.powers(s);
    softmax.drop(at, s);
    return moves;
  }

  LOWBIT_INLINE void run(const Queries& q, Softmax& softmax, RingPlace<kStages>& place) const {
    Passing tile = first(place);
    if (!tile.more) return clear(softmax.out);
    float s[1][kScores][4];
    Powers p;
    float shrink[2] = {1, 1};
    wait_for_tile(tile);
    begin_scores(tile, q, s);
    TilePosition now = tile.at;
    int stage = tile.place.stage;
    go_on(tile);
    wait_for_products<0>();
    make_powers(now, softmax, s, shrink);
    round_scores<dtype>(s, p);
    if (tile.more) wait_for_tile(tile);
    bool adds = false;
    for (; tile.more; adds = true) {
      begin_scores(tile, q, s);
      begin_result(stage, p, adds, softmax);
      const int before = stage;
      now = tile.at, stage = tile.place.stage;
      go_on(tile);
      wait_for_products<1>();
      shrink[0] = shrink[1] = 1;
      const bool moves = make_powers(now, softmax, s, shrink);
      hold(s[0]);
      if (tile.more) wait_for_tile(tile);  // ptxas moves no powers across this loop, or else across the next wait
      wait_for_products<0>();
      hold(softmax.out[0]);
      if (lane_of_warp() == 0) arrive(shared.barriers.empty[before]);
      if (moves)
#pragma unroll
        for (int half = 0; half < 2; half++) softmax.shrink_result(0, half, shrink[half]);
      round_scores<dtype>(s, p);
    }
    begin_result(stage, p, adds, softmax);
    wait_for_products<0>();
    hold(softmax.out[0]);
    if (lane_of_warp() == 0) arrive(shared.barriers.empty[stage]);
  }
};

template <DType dtype, int kE, int kEv, class Mods, class Call>
LOWBIT_INLINE void attention_forward_wgmma(const Call& call) {
  using F = WgmmaForward<dtype, kE, kEv, Mods, Call>;
  LOWBIT_DYNAMIC_SHARED(typename F::Shared, shared);
  constexpr int kWarps = WgmmaForwardShape::q_tile() / 16;
  shared.barriers.set_up_all(kWarps);
  __syncthreads();
  RingPlace<F::kStages> place;
  const auto each_task = [&](auto run) {
    const int tasks = call.launched_heads * static_cast<int>(call.q_tiles.count);
    for (int task = static_cast<int>(blockIdx.x); task < tasks; task += static_cast<int>(gridDim.x)) {
      const auto [b, h, q_step, q0, rows] = query_tile(call, task);
      run(F{.call = call, .shared = shared, .b = b, .h = h, .q_step = q_step, .q0 = q0, .rows = rows});
    }
  };
  if (warp_of_cta() >= kWarps) {
    set_registers<false, 40>();
    each_task([&](const F& forward) { forward.copy_all(place); });
  } else {
    set_registers<true, 232>();
    each_task([&](const F& forward) {
      typename F::Queries q;
      forward.load(q);
      typename F::Softmax softmax{.call = call, .factor = exponent_factor<Mods>(call)};
      softmax.start_rows();
      forward.run(q, softmax, place);
      softmax.finish(forward.b, forward.h, forward.q0, forward.q0 + forward.rows);
    });
  }
  check_fault<Mods>(call);  // outside a branch: ptxas gives no more registers to one with a trap
}

}  // namespace lowbit::cuda
