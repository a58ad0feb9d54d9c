// SPDX-License-Identifier: Apache-2.0
// The forward: a task is a tile of queries of one head, with a running softmax over the keys that it may see. Keys are
// visited from last to first: scores are often largest near the diagonal (ALiBi), and if those came last, each tile
// would raise the base of the softmax.
#pragma once

#include "core/scratch.hpp"
#include "cpu/attention/softmax.hpp"
#include "cpu/attention/visible.hpp"
#include "cpu/attention/visit.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kKvTile = 128;
constexpr int kBlockRows = 48;  // 48 x 128 scores are 27 KiB

// Rows per tile of queries. Many, because each task packs all keys that it sees (7 % of the time with 128 rows at E =
// 64, half of that with 252; AVX2, Zen 5), but q and out of a tile should fit in half of L2, and there must be tasks
// for all threads. A row's result does not depend on its tile.
LOWBIT_INLINE int64_t choose_q_tile(const ForwardCall& args, int threads) {
  const int64_t row_bytes = 4 * (row_stride(args.q.size(3)) + row_stride(args.ev()));
  int64_t tile = smaller(252, larger(48, kL2Block / row_bytes / 12 * 12));
  while (tile > 16 && args.batch() * args.heads() * ceil_div(args.q_length(), tile) < 4 * threads) tile /= 2;
  return tile;
}

template <class T>
struct ForwardTile {
  Matrix<T> q, keys, values, scores, out, buffer;
  RunningSoftmax<T> softmax;
  Visible<T> visible;
  T* factor;  // dropout factors of a row; then 1 / sum of all rows
  Programs<T> programs;

  LOWBIT_INLINE ForwardTile(const ForwardCall& args, int64_t q_tile, TileArena& arena)
      : programs(args, q_tile, kKvTile, arena) {
    const int64_t e = args.q.size(3), ev = args.ev();
    q = arena.matrix<T>(q_tile, e), keys = arena.matrix<T>(round_up(e, 16), kKvTile),
    values = arena.matrix<T>(kKvTile, ev);
    scores = arena.matrix<T>(kBlockRows, kKvTile), out = arena.matrix<T>(q_tile, ev), buffer = arena.matrix<T>(16, e);
    softmax = {arena.array<T>(q_tile),
               arena.array<T>(q_tile),
               arena.array<T>(16 * q_tile),
               out,
               round_up(ev, 16),
               static_cast<bool>(args.max_scores)};
    visible = visible_memory<T>(args, kBlockRows, kKvTile, arena);
    factor = arena.array<T>(larger(q_tile, kKvTile));
  }
};

// Divides by the sums and writes out, lse and max_scores; factor: scratch for one number per row.
template <class T>
void finish_rows(const ForwardCall& args, const TilePosition& at, const RunningSoftmax<T>& softmax, T* factor) {
  const int64_t first = (at.b * args.heads() + at.h) * args.q_length() + at.q0;
  for (int64_t r = 0; r < at.rows; r++) {
    T top = softmax.base[r], total = sum(load(softmax.sums + 16 * r)), scale = 1;
    if (args.max_scores) args.max_scores.template as<T>()[first + r] = softmax.largest[r];
    if (args.sink) {
      const T sink = args.sink.template as<T>()[at.h], now = sink > top ? sink : top;
      if (now != kMinusInfinity<T>) {
        scale = e_to_the_one(top - now);
        total = total * scale + e_to_the_one(sink - now);
        top = now;
      }
    }
    if (args.lse) args.lse.template as<T>()[first + r] = log_sum(top, total);  // -inf for a sum of 0, nan for nan
    factor[r] = total == T{0} ? T{0} : scale / total;
  }
  narrow_rows(softmax.out, factor, at.rows, args.ev(), HeadView(args.out, at.b, at.h), at.q0);
}

template <class T>
[[gnu::noinline]] void softmax_rows(Matrix<T> scores, int64_t rows, const Visible<T>& visible,
                                    const RunningSoftmax<T>& softmax) {
  visible.for_each_row(rows, [&](int64_t r, Span span) { softmax_row(softmax, r, scores.row(r), span); });
}

// One tile of keys for a tile of queries.
template <class T>
void forward_tile(const ForwardCall& args, const TilePosition& at, MemoryRows next_keys, MemoryRows next_values,
                  ForwardTile<T>& tile) {
  const int64_t e = args.q.size(3), ev = args.ev();
  const HeadView keys = keys_of(args, at.b, at.h / args.group()), values = values_of(args, at.b, at.h / args.group());
  Upcoming soon_keys = fetched_by(next_keys, at.rows, at.cols), soon_values = fetched_by(next_values, at.rows, ev);
  Upcoming modifying = fetched_by(modifying_rows(args, at, tile.programs, tile.scores), ceil_div(at.rows, 2),
                                  at.cols);  // fetched twice as fast as it is used
  bool packed = false;
  for (int first = 0; first < at.rows; first += kBlockRows) {
    const RowBlock block(at, first, kBlockRows);
    if (!find_visible(args, block, tile.programs, tile.visible)) continue;
    if (!packed)
      transpose_rows(keys, at.k0, at.cols, e, tile.keys, tile.buffer),
          widen_rows(values, at.k0, at.cols, ev, T{1}, tile.values);
    packed = true;
    const int64_t rows = block.at.rows;
    const RunningSoftmax<T> softmax = tile.softmax.from(block.at.skipped);
    const Span* spans = tile.visible.spans;
    multiply(tile.q.from(block.at.skipped), tile.keys, tile.scores, {rows, at.cols, e},
             {.columns = spans, .ahead = {&modifying, &soon_keys}});
    modify_visible(args, block, tile.programs, tile.visible, tile.scores);
    softmax_rows(tile.scores, rows, tile.visible, softmax);
    if (args.dropout_p > 0) drop_probabilities(args, block.at, tile.scores, tile.factor);
    multiply(tile.scores, tile.values, softmax.out, {rows, ev, at.cols},
             {.sum = Sum::onto, .depth = spans, .ahead = {&soon_values}});
  }
}

template <class T>
void forward_task(const ForwardCall& args, const Tilings& tilings, ForwardTile<T>& tile, int64_t b, int64_t h,
                  int64_t i) {
  const HeadView keys = keys_of(args, b, h / args.group()), values = values_of(args, b, h / args.group());
  const TilePosition all{b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
  widen_rows(HeadView(args.q, b, h), all.q0, all.rows, args.q.size(3), static_cast<T>(args.scale), tile.q);
  start_softmax(tile.softmax, all.rows);
  TilePosition at;
  const auto next_rows = [&](const HeadView& head, int64_t j, int64_t columns) {
    return j > 0 ? head_rows(head, tilings.kv.begin(j - 1), tilings.kv.size(j - 1), columns) : MemoryRows();
  };
  for (int64_t j = tilings.kv.count - 1; j >= 0; j--)
    if (tilings.visit(args, b, h, i, j, at))
      forward_tile(args, at, next_rows(keys, j, args.k.size(3)), next_rows(values, j, args.v.size(3)), tile);
  finish_rows(args, all, tile.softmax, tile.factor);
}

template <class T>
void attention_forward(const ForwardCall& args) {
  const int threads = threads_for_attention(args);
  const Tilings tilings(args, choose_q_tile(args, threads), kKvTile);
  const int64_t heads = args.batch() * args.heads();
  parallel_for(heads * tilings.q.count, threads, [&](int64_t task) {
    TileArena arena;
    ForwardTile<T>(args, tilings.q.tile, arena);
    const Scratch memory(arena.bytes);
    arena = {memory.arena()};
    ForwardTile<T> tile(args, tilings.q.tile, arena);
    const int64_t head = task / tilings.q.count,
                  i = tilings.q.count - 1 - task % tilings.q.count;  // under causality the last tiles take longest
    forward_task(args, tilings, tile, head / args.heads(), head % args.heads(), i);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
