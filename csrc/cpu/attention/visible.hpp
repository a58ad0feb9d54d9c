// SPDX-License-Identifier: Apache-2.0
// The columns of a tile that its rows may see. If causality or mask_mod cut a tile, each row tile of the products gets
// a span of columns, and only that is multiplied, modified and summed: 5/9 of a causal tile of 128 x 128, and of the
// two tiles at the ends of a sliding window.
#pragma once

#include "cpu/attention/scores.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class T>
struct Visible {
  Span all{};             // all columns, rounded up to 16
  Span* spans = nullptr;  // one per row tile, if they differ; points to `memory`
  Span* memory = nullptr;
  Matrix<T> mask;         // 0 or -inf, if mask_mod was evaluated
  bool masked = false;

  // Calls f(row, span) for rows that see something.
  template <class F>
  LOWBIT_INLINE void for_each_row(int64_t rows, F&& f) const {
    const RowTiles tiles = product_tiles(rows);
    for (int64_t t = 0; t < tiles.count; t++) {
      const Span span = spans ? spans[t] : all;
      if (span.begin >= span.end) continue;
      for (int64_t r = tiles.begin(t); r < tiles.begin(t + 1); r++) f(r, span);
    }
  }
};

template <class T>
LOWBIT_INLINE Visible<T> visible_memory(const ForwardCall& args, int64_t rows, int64_t cols,
                                        TileArena& arena) {
  Visible<T> visible;
  visible.memory = arena.array<Span>(product_tiles(rows).count);
  if (args.mask_mod) visible.mask = arena.matrix<T>(rows, cols);
  return visible;
}

// The part of a span that some row of the mask sees, in vectors of 16.
template <class T>
Span seen_span(Matrix<T> mask, int64_t first, int64_t last, Span span) {
  const auto lowest = set1(std::numeric_limits<T>::lowest());
  const auto hidden = [&](int64_t c) {
    auto most = load(mask.row(first) + c);
    for (int64_t r = first + 1; r < last; r++) most = max(most, load(mask.row(r) + c));
    return all_at_most(most, lowest);
  };
  while (span.begin < span.end && hidden(span.begin)) span.begin += 16;
  while (span.begin < span.end && hidden(span.end - 16)) span.end -= 16;
  return span;
}

// Rows of a tile of queries that go through both products before the next rows: their scores stay in L1.
struct RowBlock {
  TilePosition tile, at;  // tile: all rows; at: those of the block
  LOWBIT_INLINE RowBlock(const TilePosition& tile, int first, int most) : tile(tile), at(tile) {
    at.q0 += first, at.skipped += first, at.rows = static_cast<int>(smaller(most, tile.rows - first));
  }
};

template <class T>
LOWBIT_INLINE void run_program(ScoreMachine<T>& machine, const RowBlock& block, Matrix<T> scores) {
  run_machine_rows(machine, score_tile(block.tile, scores), static_cast<int>(block.at.q0 - block.tile.q0),
                   block.at.rows);
}

// Finds the spans of a block; false if nothing is visible.
template <class T>
bool find_visible(const ForwardCall& args, const RowBlock& block, Programs<T>& programs, Visible<T>& visible) {
  const TilePosition& at = block.at;
  visible.all = {0, round_up(at.cols, 16)}, visible.spans = nullptr;
  visible.masked = at.partial && programs.mask.call;
  if (!visible.masked && visible_columns(args, at, 0).end == at.cols &&
      visible_columns(args, at, at.rows - 1).begin == 0)
    return true;
  if (visible.masked) {
    for (int64_t r = 0; r < at.rows; r++) fill(visible.mask.row(r), visible.all.end, T{0});
    run_program(programs.mask, block, visible.mask);
    for (int64_t r = 0; r < at.rows; r++)
      fill(visible.mask.row(r) + at.cols, visible.all.end - at.cols, kMinusInfinity<T>);
  }
  visible.spans = visible.memory;
  const RowTiles tiles = product_tiles(at.rows);
  bool any = false;
  for (int64_t t = 0; t < tiles.count; t++) {
    const int64_t first = tiles.begin(t), last = tiles.begin(t + 1);
    Span span{visible_columns(args, at, first).begin / 16 * 16,
              round_up(visible_columns(args, at, last - 1).end, 16)};
    if (visible.masked) span = seen_span(visible.mask, first, last, span);
    visible.spans[t] = span;
    any |= span.begin < span.end;
  }
  return any;
}

// Zeros scores that were not computed: score_mod reads them, and sums over queries include them.
template <class T>
void clear_hidden(const Visible<T>& visible, int64_t rows, Matrix<T> scores) {
  if (!visible.spans) return;
  const RowTiles tiles = product_tiles(rows);
  for (int64_t t = 0; t < tiles.count; t++)
    for (int64_t r = tiles.begin(t); r < tiles.begin(t + 1); r++) {
      fill(scores.row(r), visible.spans[t].begin, T{0});
      fill(scores.row(r) + visible.spans[t].end, visible.all.end - visible.spans[t].end, T{0});
    }
}

// Per row tile of the keys' gradients, the queries begin .. end - 1 of a tile that see these keys, to be summed over;
// null if all see all.
template <class T>
const Span* find_seeing(const Visible<T>& visible, int64_t rows, int64_t keys, Span* seeing) {
  if (!visible.spans) return nullptr;
  const RowTiles tiles = product_tiles(rows), key_tiles = product_tiles(keys);
  for (int64_t k = 0; k < key_tiles.count; k++) {
    Span& span = seeing[k] = {rows, 0};
    for (int64_t t = 0; t < tiles.count; t++)
      if (visible.spans[t].begin < key_tiles.begin(k + 1) && visible.spans[t].end > key_tiles.begin(k)) {
        span.begin = smaller(span.begin, tiles.begin(t));
        span.end = tiles.begin(t + 1);
      }
  }
  return seeing;
}

// The rows of a captured bias or a mask that modify_visible will read for this tile.
template <class T>
MemoryRows modifying_rows(const ForwardCall& args, const TilePosition& at, Programs<T>& programs,
                          Matrix<T> scores) {
  if (programs.score.call) return prepare_machine(programs.score, score_tile(at, scores));
  if (!args.mask || args.mask.stride[3] != 1) return {};
  const int64_t size = static_cast<int64_t>(size_of(args.mask.dtype)), row = args.mask.stride[2] * size;
  const char* head =
      args.mask.as<const char>() + (at.b * args.mask.stride[0] + at.h * args.mask.stride[1] + at.k0) * size;
  return {head + at.q0 * row, row ? at.rows : 1, at.cols * size, row};
}

// Turns raw scores into the scores of the softmax, where visible.
template <class T>
void modify_visible(const ForwardCall& args, const RowBlock& block, Programs<T>& programs,
                    const Visible<T>& visible, Matrix<T> scores) {
  const TilePosition& at = block.at;
  if (programs.score.call) {
    clear_hidden(visible, at.rows, scores);
    run_program(programs.score, block, scores);
  }
  if (visible.masked)
    visible.for_each_row(at.rows, [&](int64_t r, Span span) {
      const T* mask = visible.mask.row(r);
      T* row = scores.row(r);
      for (int64_t c = span.begin; c < span.end; c += 16) store(row + c, hidden(load(mask + c), load(row + c)));
    });
  if (args.mask) add_mask(args.mask, at, scores);
  if (visible_columns(args, at, 0).end == visible.all.end && visible_columns(args, at, at.rows - 1).begin == 0) return;
  visible.for_each_row(at.rows, [&](int64_t r, Span span) {
    const Span seen = visible_columns(args, at, r);
    fill(scores.row(r) + span.begin, seen.begin - span.begin, kMinusInfinity<T>);
    fill(scores.row(r) + seen.end, span.end - seen.end, kMinusInfinity<T>);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
