// SPDX-License-Identifier: Apache-2.0
// Pairs of tokens and experts in the order of experts, and the rows of x in that order.
#pragma once

#include "cuda/experts/call.hpp"
#include "gpu/device/reduce.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE int32_t expert_of_pair(const ExpertsCall& call, int64_t pair) {
  const int64_t expert = call.index_dtype == DType::int64 ? static_cast<const int64_t*>(call.index)[pair]
                                                          : static_cast<const int32_t*>(call.index)[pair];
  if (expert < 0 || expert > call.experts) fail();
  return static_cast<int32_t>(expert);
}

// One CTA. The order of the pairs of an expert is that in which threads come; no result depends on it.
LOWBIT_INLINE void sort_pairs(const ExpertsCall& call) {
  LOWBIT_SHARED(int32_t, counts, [kMaxExperts]);
  LOWBIT_SHARED(int32_t, next_row, [kMaxExperts]);
  const auto thread = static_cast<int>(threadIdx.x);
  for (int e = thread; e < call.experts; e += kLinearThreads) counts[e] = 0;
  for (int block = thread; block < call.blocks; block += kLinearThreads) call.expert_of_block[block] = -1;
  for (int64_t row = thread; row < call.all_rows(); row += kLinearThreads) call.pair_of_row[row] = -1;
  __syncthreads();  // zeros, before they are counted up
  for (int64_t pair = thread; pair < call.pairs(); pair += kLinearThreads) {
    const int32_t expert = expert_of_pair(call, pair);
    if (expert < call.experts) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();  // the counts of all threads
  const auto blocks_of = [&](int e) { return ceil_div(counts[e], call.rows_of_block); };
  for (int e = thread; e < call.experts; e += kLinearThreads) {
    int32_t first = 0;
    for (int before = 0; before < e; before++) first += blocks_of(before);
    next_row[e] = first * call.rows_of_block;
    for (int32_t block = first; block < first + blocks_of(e); block++) call.expert_of_block[block] = e;
  }
  __syncthreads();  // the first rows of all experts
  for (int64_t pair = thread; pair < call.pairs(); pair += kLinearThreads) {
    const int32_t expert = expert_of_pair(call, pair),
                  row = expert < call.experts ? atomicAdd(&next_row[expert], 1) : -1;
    call.row_of_pair[pair] = row;
    if (row < 0) continue;
    // Not so if another stream has changed the index since it was counted.
    if (row >= call.all_rows() || call.expert_of_block[row / call.rows_of_block] != expert) return fail();
    call.pair_of_row[row] = static_cast<int32_t>(pair);
  }
}

// One CTA per row.
template <class Word>
LOWBIT_INLINE void copy_row(const void* from, void* to, int64_t row_from, int64_t row_to, int64_t words) {
  const auto* x = static_cast<const Word*>(from) + row_from * words;
  auto* out = static_cast<Word*>(to) + row_to * words;
  for (int64_t i = threadIdx.x; i < words; i += kLinearThreads) out[i] = row_from < 0 ? Word{} : x[i];
}

LOWBIT_INLINE void gather_rows(const ExpertsCall& call) {
  const int64_t row = blockIdx.x, bytes = call.width * (call.dtype == DType::float32 ? 4 : 2);
  const int32_t pair = call.pair_of_row[row];
  const int64_t token = pair < 0 ? -1 : pair / call.each;
  if (bytes % 16 == 0 && reinterpret_cast<std::size_t>(call.x) % 16 == 0)
    copy_row<uint4>(call.x, call.rows, token, row, bytes / 16);
  else copy_row<uint16_t>(call.x, call.rows, token, row, bytes / 2);
}

}  // namespace lowbit::cuda
