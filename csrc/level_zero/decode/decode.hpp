// SPDX-License-Identifier: Apache-2.0
// decode: a work-group has eight of the queries that share a head of keys, and a split of these keys; a second kernel
// combines the splits. Codes are read once and converted to floats in local memory.
#pragma once

#include "level_zero/attention/scores.hpp"
#include "level_zero/decode/codes.hpp"

namespace lowbit::level_zero {

template <int kColumns, bool kMods>
struct Decode {
  using Sums = Running<kColumns, 1>;

  struct Shared {
    alignas(16) float q[kDecodeRows][kColumns];
    SharedTile<kColumns> tile;
  };

  const DecodeCall& call;
  Shared& shared;
  int b, kv_head, thread;
  int row, h, l;  // the sub-group's query: index among those that share keys, head, position
  Sums sums;

  LOWBIT_INLINE void load_q(int first) {
    for (int at = thread; at < kDecodeRows * kColumns; at += kAttentionThreads) {
      const int r = first + at / kColumns, column = at % kColumns;
      const bool is_there = r < call.group * call.length && column < call.k.columns;
      const int64_t from = row_at(call.q, b, kv_head * call.group + r / call.length, r % call.length) + column;
      shared.q[at / kColumns][column] = is_there ? load_real(call.q.data, call.dtype, from) : 0.0f;
    }
    __syncthreads();
    if (call.rotation) rotate(shared.q, call.k.padded, call.rotation, thread);
  }

  LOWBIT_INLINE void load(const KvRows& from, int first, int count) {
    if (from.kind == KvKind::floating) {
      for (int at = thread; at < kKvTile * kColumns; at += kAttentionThreads) {
        const int r = at / kColumns, column = at % kColumns;
        shared.tile.rows[r][column] =
            r < count && column < from.columns
                ? load_real(from.rows.data, from.dtype, row_at(from.rows, b, kv_head, first + r) + column) : 0.0f;
      }
      return;
    }
    const int words = words_of(from);
    for (int r = thread / kSubGroup; r < kKvTile; r += kSubGroups) {
      float* row = shared.tile.rows[r];
      for (int word = sums.lane; r < count && word < words; word += kSubGroup)
        decode_word(from, b, kv_head, first + r, word, [=](int column, float value) { row[column] = value; });
      for (int column = sums.lane; r >= count && column < kColumns; column += kSubGroup) row[column] = 0;
    }
  }

  LOWBIT_INLINE float modified(float product, int k) const {
    const int64_t q = call.position + l;
    if (k >= call.kv_length || (call.causal && k > q) || (call.window && k <= q - call.window))
      return gpu::minus_infinity();
    float s = product * call.scale;
    if constexpr (kMods) {
      if (call.score.words) s = score_mod(s, b, h, static_cast<int>(q), k, global<uint64_t>(call.score.words));
      if (call.mask.words) s = mask_mod(s, b, h, static_cast<int>(q), k, global<uint64_t>(call.mask.words));
    }
    return call.bias ? s + bias_of(call, b, h, l, k) : s;
  }

  // Whether any query of the call sees one of these keys.
  LOWBIT_INLINE bool is_seen(int first, int count) const {
    return !(call.causal && first > call.position + call.length - 1) &&
           !(call.window && first + count - 1 <= call.position - call.window);
  }

  LOWBIT_INLINE void run(int begin, int end) {
    const int columns = call.k.kind == KvKind::floating ? call.k.columns : call.k.padded;
    for (int first = begin; first < end; first += kKvTile) {
      const int count = end - first < kKvTile ? end - first : kKvTile;
      if (!is_seen(first, count)) continue;
      __syncthreads();  // all threads are done with the values before
      load(call.k, first, count);
      __syncthreads();
      Scores<1> s;
      multiply_rows(s, sums.q, shared.tile, sums.lane, columns);
      __syncthreads();
      load(call.v, first, count);
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        const int k = first + sums.lane + j * kSubGroup;
        s[0][j] = row < call.group * call.length ? modified(s[0][j], k) : gpu::minus_infinity();
      }
      sums.softmax(s);
      __syncthreads();
      multiply_onto<1, kColumns>(sums.out, s, shared.tile, sums.lane);
    }
  }

  LOWBIT_INLINE void store(int split) const {
    const float total = sum_of_lanes(sums.total[0]);
    if (row >= call.group * call.length) return;
    const int64_t at = (static_cast<int64_t>(b) * call.heads + h) * call.length + l;
    float* to = call.partial + (at * call.splits + split) * (call.v.columns + 2);
#pragma unroll
    for (int c = 0; c < Sums::kSums; c++)
      if (sums.lane + c * kSubGroup < call.v.columns) to[sums.lane + c * kSubGroup] = sums.out[0][c];
    if (sums.lane == 0) to[call.v.columns] = sums.top[0], to[call.v.columns + 1] = total;
  }
};

template <int kColumns, bool kMods>
LOWBIT_INLINE void decode_split(const DecodeCall& call) {
  using D = Decode<kColumns, kMods>;
  LOWBIT_SHARED(typename D::Shared, shared, );
  const auto group = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x),
             kv_heads = call.heads / call.group;
  const int split = group % call.splits, tile = group / call.splits % call.row_tiles,
            head = group / call.splits / call.row_tiles, first = tile * kDecodeRows;
  const int row = first + thread / kSubGroup, kv_head = head % kv_heads;
  D decode{.call = call, .shared = shared, .b = head / kv_heads, .kv_head = kv_head, .thread = thread, .row = row,
           .h = kv_head * call.group + row / call.length, .l = row % call.length,
           .sums = {.q = shared.q + thread / kSubGroup, .lane = thread % kSubGroup}};
  decode.load_q(first);
  decode.sums.start();
  const int begin = split * kSplit, end = begin + kSplit < call.kv_length ? begin + kSplit : call.kv_length;
  decode.run(begin, end);
  decode.store(split);
}

// One sub-group per query.
LOWBIT_INLINE void decode_combine(const DecodeCall& call) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kSubGroups + threadIdx.x / kSubGroup;
  if (at >= static_cast<int64_t>(call.batch) * call.heads * call.length) return;
  const int lane = static_cast<int>(threadIdx.x) % kSubGroup, ev = call.v.columns;
  const auto h = static_cast<int>(at / call.length % call.heads), b = static_cast<int>(at / call.length / call.heads);
  const float* from = call.partial + at * call.splits * (ev + 2);
  float top = gpu::minus_infinity(), total = 0;
  for (int i = 0; i < call.splits; i++) top = larger_of(top, from[i * (ev + 2) + ev]);
  const float base = top == gpu::minus_infinity() ? 0.0f : top;
  for (int i = 0; i < call.splits; i++)
    total += from[i * (ev + 2) + ev + 1] * exponential(from[i * (ev + 2) + ev] - base);
  RowEnd end{top, total};
  if (call.sink) end.add_sink(call.sink[h]);
  if (call.lse && lane == 0) call.lse[at] = end.lse();
  const float by = end.factor();
  for (int column = lane; column < ev; column += kSubGroup) {
    float sum = 0;
    for (int i = 0; i < call.splits; i++)
      sum = __fmaf_rn(from[i * (ev + 2) + column], exponential(from[i * (ev + 2) + ev] - base), sum);
    store_real(call.out.data, call.dtype, row_at(call.out, b, h, at % call.length) + column, sum * by);
  }
}

}  // namespace lowbit::level_zero
