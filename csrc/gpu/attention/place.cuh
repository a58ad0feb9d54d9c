// SPDX-License-Identifier: Apache-2.0
// The positions of tiles of scores, and their visibility, on any device: classes of the blocks listed by a block mask,
// causality, dropout. A Call is an AttentionCallOf. The device defines refuse(call), for a list with an invalid entry.
#pragma once

#include "core/random.hpp"
#include "gpu/attention/call.hpp"

namespace lowbit::gpu {

LOWBIT_INLINE float minus_infinity() { return -__builtin_inff(); }

// Iterates over the tiles of a Tiling without divisions.
struct TileStep {
  int index = 0, block = 0, within = 0;

  LOWBIT_INLINE static TileStep at(const Tiling& tiling, int index) {
    const auto per_block = static_cast<int>(tiling.per_block);
    return {index, index / per_block, index % per_block};
  }
  LOWBIT_INLINE void next(const Tiling& tiling) {
    index++, within++;
    if (within == static_cast<int>(tiling.per_block)) within = 0, block++;
  }
  LOWBIT_INLINE int begin(const Tiling& tiling) const {
    return block * static_cast<int>(tiling.block) + within * static_cast<int>(tiling.tile);
  }
  LOWBIT_INLINE int size(const Tiling& tiling) const {
    const int64_t rest = smaller(tiling.length, (block + int64_t{1}) * tiling.block) - begin(tiling);
    return static_cast<int>(smaller(tiling.tile, rest));
  }
};

// The queries of a task, from the index of a CTA. Under causality the last ones have most work, and come first.
struct QueryTile {
  int b, h;
  TileStep step;
  int begin, rows;
};
template <class Call>
LOWBIT_INLINE QueryTile query_tile(const Call& call, int task) {
  const int heads = call.launched_heads, head = call.first_head + task % heads;
  const auto step = TileStep::at(call.q_tiles, static_cast<int>(call.q_tiles.count) - 1 - task / heads);
  return {head / call.heads, head % call.heads, step, step.begin(call.q_tiles), step.size(call.q_tiles)};
}

// Position of a tile of scores. q0: index of its first query.
struct TilePosition {
  int b, h, q0, rows, k0, cols;
  bool partial;  // mask_mod must be evaluated
  bool cut;      // cut by the ends of q and k, by causality or by the window
};

constexpr uint8_t kEmptyBlock = 0, kPartialBlock = 1;

template <class Call>
LOWBIT_INLINE uint8_t class_of(const Call& call, int b, int h, int64_t q_block, int64_t kv_block) {
  if (!call.classes) return kPartialBlock;
  return call.classes[b * call.class_batch + h * call.class_head + q_block * call.class_columns + kv_block];
}

// False if no score of the tile is visible.
template <class Call>
LOWBIT_INLINE bool find_tile(const Call& call, int b, int h, const TileStep& q, const TileStep& k, TilePosition& at) {
  at = {b, h, q.begin(call.q_tiles) + call.position, q.size(call.q_tiles), k.begin(call.kv_tiles),
        k.size(call.kv_tiles), false, false};
  if (call.causal && at.k0 >= at.q0 + at.rows) return false;
  if (call.window > 0 && at.k0 + at.cols <= at.q0 - call.window + 1) return false;
  const uint8_t block = class_of(call, b, h, q.block, k.block);
  at.partial = block == kPartialBlock;
  at.cut = (call.causal && at.k0 + at.cols > at.q0 + 1) ||
           (call.window > 0 && at.k0 < at.q0 + at.rows - call.window);
  return block != kEmptyBlock;
}

// Advances `step`, over keys or over queries, past empty blocks, four at a time, whose classes are loaded together. One
// at a time, each load would wait for the one before: 512 times in 32768 keys with a window of 1024.
template <bool kKeysPass, class Call>
LOWBIT_INLINE void pass_empty(const Call& call, int b, int h, const TileStep& stays, TileStep& step) {
  const Tiling& tiling = kKeysPass ? call.kv_tiles : call.q_tiles;
  if (!call.classes || step.within) return;
  constexpr int kTogether = 4;
  const int blocks = static_cast<int>(kKeysPass ? call.class_columns : call.class_rows);
  const int64_t stride = kKeysPass ? 1 : call.class_columns;
  const uint8_t* classes = call.classes + b * call.class_batch + h * call.class_head +
                           stays.block * (kKeysPass ? call.class_columns : int64_t{1});
  for (; step.index < static_cast<int>(tiling.count) && step.block + kTogether <= blocks;
       step.block += kTogether, step.index += kTogether * static_cast<int>(tiling.per_block)) {
    uint32_t any = 0;
#pragma unroll
    for (int i = 0; i < kTogether; i++) any |= classes[(step.block + i) * stride];
    if (any != 0) return;
  }
}

template <class Call>
LOWBIT_INLINE bool is_hidden(const Call& call, const TilePosition& at, int q, int k) {
  return k >= at.k0 + at.cols || q >= at.q0 + at.rows || (call.causal && k > q) ||
         (call.window > 0 && k <= q - call.window);
}

// The random number of a probability, which is dropped if the number is below `dropped`.
LOWBIT_INLINE uint32_t dropout_draw(int64_t seed, int head, int q, int k) {
  const auto key = static_cast<uint64_t>(seed);
  auto words = philox4x32({static_cast<uint32_t>(k) / 4, static_cast<uint32_t>(q), static_cast<uint32_t>(head), 0},
                          {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
  const uint32_t low = k & 1 ? words[1] : words[0], high = k & 1 ? words[3] : words[2];
  return k & 2 ? high : low;
}

// Whether any of the queries has probabilities that do not add up to 1.
LOWBIT_INLINE bool any_has_rest(const RowStatistics* statistics, int rows) {
  bool any = false;
  for (int row = 0; row < rows; row++) any |= statistics[row].has_rest();
  return any;
}

// The gradient of the sink of head blockIdx.x is - sum over b and q of exp(sink - lse) D: the share of this thread.
template <class Sum, class Call, class Exponential>
LOWBIT_INLINE Sum sink_gradient_of_thread(const Call& call, Exponential exponential) {
  const int64_t length = call.q_tiles.length, h = blockIdx.x;
  Sum sum = 0;
  for (int64_t i = threadIdx.x; i < call.batch * length; i += kAttentionThreads) {
    const int64_t at = (i / length * call.heads + h) * length + i % length;
    if (call.lse[at] == minus_infinity()) continue;
    const RowStatistics of_row = call.statistics[at];
    const float p = exponential(call.sink[h] - of_row.lse) * (of_row.has_rest() ? call.unit[at] : 1.0f);
    sum -= static_cast<Sum>(p) * of_row.delta;
  }
  return sum;
}

template <class Call>
LOWBIT_INLINE void read_list(const Call& call, const ListCall& list, uint8_t* row, uint8_t what) {
  if (!list.counts) return;
  const int64_t at = blockIdx.x, i = at % call.class_rows, h = at / call.class_rows % call.class_heads,
                b = at / call.class_rows / call.class_heads;
  const int count = list.counts[b * list.count_stride[0] + h * list.count_stride[1] + i * list.count_stride[2]];
  if (count < 0 || count > list.most) refuse(call);
  for (int j = static_cast<int>(threadIdx.x); j < count; j += kAttentionThreads) {
    const int block = list.indices[b * list.index_stride[0] + h * list.index_stride[1] + i * list.index_stride[2] +
                                   j * list.index_stride[3]];
    if (block < 0 || block >= call.class_columns) refuse(call);
    else row[block] = what;
  }
}

// One CTA per row of blocks. The barrier orders global memory too, as __syncthreads() does on CUDA.
template <class Call, class Barrier>
LOWBIT_INLINE void make_classes(const Call& call, Barrier barrier_of_all_memory) {
  uint8_t* row = call.classes + blockIdx.x * call.class_columns;
  for (int64_t j = threadIdx.x; j < call.class_columns; j += kAttentionThreads) row[j] = 0;
  barrier_of_all_memory();
  read_list(call, call.lists[0], row, 1);
  barrier_of_all_memory();  // a block in both lists is full
  read_list(call, call.lists[1], row, 2);
}

}  // namespace lowbit::gpu
