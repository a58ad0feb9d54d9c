// SPDX-License-Identifier: Apache-2.0
// The backward on compute capability 9.0, with warpgroup products: the passes of backward.cuh. A CTA keeps 128 rows, 64
// per warpgroup, in shared memory as first factors; a producer warpgroup copies these, then tiles of the other side to
// a ring. While one warpgroup differentiates its scores, the tensor cores run the products of the other.
#pragma once

#include "cuda/attention/backward.cuh"
#include "cuda/attention/matrices.cuh"

namespace lowbit::cuda {

template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay>
struct WgmmaBackward {
  static constexpr WgmmaBackwardShape kShape = wgmma_backward_shape(kE, kEv, Mods::kGathers, kKeysStay);
  static constexpr int kPassing = kShape.passing, kScores = kPassing / 8, kStages = kShape.stages;
  using PassOf = Pass<dtype, kShape.kStaying, kPassing, Mods, kKeysStay, WgmmaAttentionCall>;
  using Scores = float[1][kScores][4];
  using Factor = uint32_t[kScores / 2][4];
  template <int kRows>
  struct Sides {  // queries and grad_out, or keys and values
    SharedLines<kRows, kE> left;
    SharedLines<kRows, kEv> right;
  };

  struct Shared {
    Sides<kShape.kStaying> staying;
    Sides<kPassing> ring[kStages];
    alignas(16) RowStatistics statistics[kStages][kPassing];  // statistics of the queries that pass
    RingBarriers<kStages> barriers;
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const WgmmaAttentionCall& call;
  Shared& shared;
  PassOf pass;

  // The tiles that pass, and the stage of the next one.
  struct Passing {
    typename PassOf::Visit visit;
    RingPlace<kStages> place{};
    bool more = false;
  };
  LOWBIT_INLINE Passing first() const {
    Passing tile{.visit = {pass.first_head, {}, {}}};
    tile.more = pass.find_next(tile.visit);
    return tile;
  }
  LOWBIT_INLINE void go_on(Passing& tile) const {
    tile.place.go_on();
    tile.visit.step.next(pass.passing_tiles());
    tile.more = pass.find_next(tile.visit);
  }

  LOWBIT_INLINE void copy_all() const {
    Passing tile = first();
    if (!tile.more) return;
    // The first stage is complete when these copies have arrived too.
    pass.staying_left().copy_to(shared.staying.left), pass.staying_right().copy_to(shared.staying.right);
    for (; tile.more; go_on(tile)) {
      wait_for(shared.barriers.empty[tile.place.stage], tile.place.phase ^ 1);
      pass.passing_left(tile.visit).copy_to(shared.ring[tile.place.stage].left);
      pass.passing_right(tile.visit).copy_to(shared.ring[tile.place.stage].right);
      if constexpr (kKeysStay)
        if (const int query = static_cast<int>(threadIdx.x) % 128; query < kPassing)
          copy_through_l1<8>(&shared.statistics[tile.place.stage][query],
                             call.statistics + pass.row(tile.visit.at, query));
      arrive_with_copies(shared.barriers.full[tile.place.stage]);
    }
  }

  template <int kColumns>
  LOWBIT_INLINE static void multiply(Scores& c, const SharedLines<kShape.kStaying, kColumns>& stays,
                                     const SharedLines<kPassing, kColumns>& passing) {
    const int first = warp_of_cta() / 4 * 64;
#pragma unroll
    for (int k = 0; k < kColumns; k += 16)
      multiply_lines<dtype>(c[0], stays.at(first, k), passing.at(0, k), k > 0);
  }
  LOWBIT_INLINE void begin_scores(const Passing& tile, Scores& s, Scores& dp) const {
    wait_for(shared.barriers.full[tile.place.stage], tile.place.phase);
    show_to_products();
    fresh(s[0]), fresh(dp[0]);
    begin_products();
    multiply(s, shared.staying.left, shared.ring[tile.place.stage].left);
    multiply(dp, shared.staying.right, shared.ring[tile.place.stage].right);
    commit_products();
  }
  template <int kColumns>
  LOWBIT_INLINE static void multiply_onto(float (&c)[1][kColumns / 8][4], const Factor& a,
                                          const SharedLines<kPassing, kColumns>& passing, bool adds) {
    constexpr int kPanelStep = SharedLines<kPassing, kColumns>::kPanelStep;
#pragma unroll
    for (int k = 0; k < kPassing / 16; k++)
      multiply_by_lines_of_k<dtype, kPanelStep>(c[0], a[k], passing.at(k * 16, 0), k > 0 || adds);
  }

  LOWBIT_INLINE auto statistics_of_staying(const TilePosition& at) const {
    if constexpr (kKeysStay) return 0;  // for queries that pass they are in the ring
    else return typename PassOf::KeptStatistics{call.statistics[pass.row_of_lane(at)]};
  }
  template <class Statistics>
  LOWBIT_INLINE void differentiate(const TilePosition& at, const Statistics& statistics, Scores& s, Scores& dp) const {
    if (at.cut) pass.template differentiate<true>(at, statistics, s, dp);
    else pass.template differentiate<false>(at, statistics, s, dp);
  }

  LOWBIT_INLINE void run() const {
    float grad[1][kE / 8][4], grad_values[1][kKeysStay ? kEv / 8 : 1][4];
    Passing tile = first();
    if (!tile.more) {
      clear(grad), clear(grad_values);
      return pass.store(grad, kE, grad_values, kEv);
    }
    Scores s, dp;
    Factor p, ds;
    const auto kept = statistics_of_staying(tile.visit.at);
    begin_scores(tile, s, dp);
    for (bool adds = false;; adds = true) {
      const TilePosition now = tile.visit.at;
      const int stage = tile.place.stage;
      go_on(tile);
      wait_for_products<0>();
      hold(s[0]), hold(dp[0]);
      if (adds && lane_of_warp() == 0) arrive(shared.barriers.empty[stage == 0 ? kStages - 1 : stage - 1]);
      if constexpr (kKeysStay)
        differentiate(now, typename PassOf::StatisticsOfTile{shared.statistics[stage]}, s, dp);
      else differentiate(now, kept, s, dp);
      if constexpr (kKeysStay) round_scores<dtype>(s, p);
      round_scores<dtype>(dp, ds);
      begin_products();
      if constexpr (kKeysStay) multiply_onto<kEv>(grad_values, p, shared.ring[stage].right, adds);
      multiply_onto<kE>(grad, ds, shared.ring[stage].left, adds);
      commit_products();
      if (!tile.more) break;
      begin_scores(tile, s, dp);
    }
    wait_for_products<0>();
    hold(grad[0]), hold(grad_values[0]);
    pass.store(grad, kE, grad_values, kEv);
  }
};

template <DType dtype, int kE, int kEv, class Mods, bool kKeysStay>
LOWBIT_INLINE void attention_backward_wgmma(const WgmmaAttentionCall& call) {
  using B = WgmmaBackward<dtype, kE, kEv, Mods, kKeysStay>;
  constexpr int kWarps = WgmmaBackwardShape::kStaying / 16;
  LOWBIT_DYNAMIC_SHARED(typename B::Shared, shared);
  shared.barriers.set_up_all(kWarps);
  __syncthreads();
  const B backward{.call = call, .shared = shared,
                   .pass = pass_of<typename B::PassOf, kKeysStay>(call, static_cast<int>(blockIdx.x))};
  if (warp_of_cta() >= kWarps) {
    set_registers<false, 40>();
    backward.copy_all();
  } else {
    set_registers<true, 232>();
    backward.run();
  }
  check_fault<Mods>(call);  // outside a branch: ptxas gives no more registers to one with a trap
}

}  // namespace lowbit::cuda
