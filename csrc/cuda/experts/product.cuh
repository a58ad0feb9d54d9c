// SPDX-License-Identifier: Apache-2.0
// The products of all experts in one launch: a CTA is one of linear's (linear/product.cuh) with the weight of the
// expert that its rows belong to. It stores sums, which ends.cuh finishes.
#pragma once

#include "cuda/experts/call.hpp"
#include "cuda/linear/product.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE LinearCall call_of_expert(const ExpertsCall& given, int32_t expert) {
  LinearCall call = given.product.call;
  call.weight += expert * given.weight_bytes;
  if (call.bias)
    call.bias = static_cast<const char*>(call.bias) + expert * call.spec.n * (call.bias_dtype == DType::float32 ? 4 : 2);
  return call;
}

template <Format kFormat, int kXParts, int kTileGroups, bool kAsymmetric, int kRows, bool kInPlace>
LOWBIT_INLINE void product_of_experts(const ExpertsCall& given) {
  using P = Product<kFormat, kXParts, kTileGroups, kAsymmetric, kRows, kInPlace>;
  constexpr int kColumns = P::kPanels * kPanelColumns;
  LOWBIT_DYNAMIC_SHARED(typename P::Shared, shared);
  const int splits = given.product.splits;
  const auto blocks = static_cast<int>(given.all_rows() / kRows), cta = static_cast<int>(blockIdx.x) / splits;
  const int first_panel = cta / blocks * P::kPanels, first_row = cta % blocks * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  let_next_begin();
  if constexpr (is_table(kFormat)) {
    write_levels<kFormat>(shared.levels);
    __syncthreads();
  }
  wait_for_kernels_before();
  if (given.pair_of_row[first_row] < 0) return;  // pairs are the first rows of a block
  const LinearCall call = call_of_expert(given, given.expert_of_block[first_row / given.rows_of_block]);
  const int split = static_cast<int>(blockIdx.x) % splits, of_split = ceil_div(call.tiles, splits),
            begin = split * of_split, end = static_cast<int>(smaller(begin + of_split, call.tiles));
  P product{.call = call, .shared = shared, .first_panel = first_panel, .first_row = first_row, .lane = lane,
            .g = lane / 4, .t = lane % 4, .sum = {}, .total = {}, .result = {}};
  product.run(warp, begin + warp, end);
  const auto& results = product.hand_over(warp);
  auto* const sums = static_cast<typename P::Result*>(given.product.partial) + split * call.m * call.spec.n;
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kColumns; at += kLinearThreads) {
    const int64_t row = first_row + at / kColumns, n = first_panel * kPanelColumns + at % kColumns;
    if (n < call.spec.n) sums[row * call.spec.n + n] = P::whole(results, at);
  }
}

}  // namespace lowbit::cuda
