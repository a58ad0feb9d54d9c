// SPDX-License-Identifier: Apache-2.0
// The matrix products of the backward (formulas: backward.hpp) on the tile unit, with factors in kParts of bfloat16:
// scores and grad_out v^T with keys and values packed as weight tiles, grad_q with tiles of keys. grad_k and grad_v are
// accumulated transposed, grad_v^T += grad_out^T p, because p as computed is easily packed as weights, but not as
// activations. Queries are packed once per task for all tiles of keys, in both orders.
#pragma once

#include "cpu/attention/amx_tiles.hpp"
#include "cpu/attention/backward.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A tile of queries as activations, row by row and column by column. Each part of a column is contiguous, so that a
// product can begin at any query.
template <int kParts>
struct PackedQueries {
  PartRows q, grad_out, q_columns, grad_out_columns;
  LOWBIT_INLINE PackedQueries(int64_t rows, int64_t e, int64_t ev, Arena& arena)
      : q(part_rows<kParts>(rows, e, arena)),
        grad_out(part_rows<kParts>(rows, ev, arena)),
        q_columns(columns_of(e, rows, arena)),
        grad_out_columns(columns_of(ev, rows, arena)) {}
  LOWBIT_INLINE static PartRows columns_of(int64_t columns, int64_t rows, Arena& arena) {
    PartRows made = part_rows<kParts>(round_up(columns, kTileRows), rows, arena);
    made.step = kStepBytes, made.part = steps_of(rows) * kStepBytes;
    return made;
  }
};

template <int kParts>
struct AmxBackwardTile : BackwardScores<float> {
  TileUnit unit{kStepBytes};
  int64_t e, ev, rows, tiles;                 // rows: of packed queries; tiles: number of query tiles per head
  uint8_t *keys, *keys_t, *values_t, *pairs;  // packed; pairs: p or ds
  PartRows ds_rows, part;                     // part: 16 rows to be packed
  Matrix<float> grad_k_t, grad_v_t, buffer, transposed, last_rows;  // last_rows: incomplete row tile of grad_q
  int64_t slots;  // tiles of packed queries kept: those of all heads of a kv head, or one if memory is short
  char* packed;
  bool* is_packed;
  int64_t b = -1, kv_head = -1;  // indices of the packed tiles
  PackedQueries<kParts> queries;

  LOWBIT_INLINE AmxBackwardTile(const ForwardCall& args, const Tiling& q_tiles, int64_t grad_q_rows,
                                const ScorePlan ScoreProgram::* reverse_plan, TileArena& arena)
      : BackwardScores<float>(args, q_tiles.tile, round_up(q_tiles.tile, kStep), grad_q_rows, reverse_plan, arena),
        e(args.q.size(3)),
        ev(args.v.size(3)),
        rows(round_up(q_tiles.tile, kStep) + kStep),
        tiles(q_tiles.count),
        keys(tiles_of(e, kBackwardKvTile, arena)),
        keys_t(tiles_of(kBackwardKvTile, e, arena)),
        values_t(tiles_of(kBackwardKvTile, ev, arena)),
        pairs(tiles_of(kBackwardKvTile, rows, arena)),
        ds_rows(part_rows<kParts>(rows, kBackwardKvTile, arena)),
        part(part_rows<kParts>(kTileRows, larger(e, ev), arena)),
        grad_k_t(arena.matrix<float>(round_up(e, kTileRows), kBackwardKvTile)),
        grad_v_t(arena.matrix<float>(round_up(ev, kTileRows), kBackwardKvTile)),
        buffer(arena.matrix<float>(kStep, larger(e, ev))),
        transposed(arena.matrix<float>(kBackwardKvTile, larger(e, ev))),
        last_rows(arena.matrix<float>(kTileRows, e)),
        slots(args.group() * tiles * packed_bytes() <= kMaxPackedBytes ? args.group() * tiles : 1),
        packed(arena.array<char>(slots * packed_bytes())),
        is_packed(arena.array<bool>(slots)),
        queries(of(0)) {}

  // Memory for weight tiles of `columns` columns and `depth` rows.
  LOWBIT_INLINE static uint8_t* tiles_of(int64_t columns, int64_t depth, Arena& arena) {
    return arena.array<uint8_t>(ceil_div(columns, 16) * steps_of(depth) * kParts * kTileBytes);
  }
  LOWBIT_INLINE int64_t packed_bytes() const {
    Arena counted;
    PackedQueries<kParts>(rows, e, ev, counted);
    return counted.bytes;
  }
  LOWBIT_INLINE PackedQueries<kParts> of(int64_t slot) const {
    Arena arena{packed + slot * packed_bytes()};
    return {rows, e, ev, arena};
  }
};

// Rows of a head, in parts, as activations in both orders.
template <int kParts>
void pack_queries(const HeadView& head, int64_t first, int64_t rows, int64_t columns, Matrix<float> buffer,
                         PartRows by_row, PartRows by_column) {
  std::memset(by_column.data, 0, round_up(columns, kTileRows) * by_column.stride);
  for (int64_t r = 0; r < rows; r += kStep) {
    const int64_t count = smaller(kStep, rows - r);
    widen_rows(head, first + r, count, columns, 1.0f, buffer);
    clear_rows(buffer.from(count), kStep - count);
    cut_rows<kParts>(buffer, kStep, {0, columns}, by_row.from(r));
    cut_columns<kParts>(buffer, columns, r / kStep, by_column);
  }
}

template <int kParts>
void load_queries(const BackwardCall& args, const TilePosition& at, int64_t i,
                         const RowStatistics<float>& statistics, AmxBackwardTile<kParts>& tile) {
  const ForwardCall& forward = args.forward;
  const int64_t group = forward.group(), all = group * tile.tiles;
  const int64_t slot = tile.slots == all ? at.h % group * tile.tiles + i : 0;
  if (tile.slots != all || tile.b != at.b || tile.kv_head != at.h / group) std::memset(tile.is_packed, 0, tile.slots);
  tile.b = at.b, tile.kv_head = at.h / group, tile.queries = tile.of(slot);
  if (!tile.is_packed[slot]) {
    pack_queries<kParts>(HeadView(forward.q, at.b, at.h), at.q0, at.rows, tile.e, tile.buffer, tile.queries.q,
                         tile.queries.q_columns);
    pack_queries<kParts>(HeadView(args.grad_out, at.b, at.h), at.q0, at.rows, tile.ev, tile.buffer,
                         tile.queries.grad_out, tile.queries.grad_out_columns);
    tile.is_packed[slot] = true;
  }
  load_statistics(forward, at, statistics, tile);
}

template <int kParts>
void load_keys(const ForwardCall& args, const TilePosition& at, AmxBackwardTile<kParts>& tile) {
  const HeadView keys(args.k, at.b, at.h / args.group()), values(args.v, at.b, at.h / args.group());
  pack_transposed<kParts>(keys, at.k0, at.cols, tile.e, tile.part, tile.keys_t);
  pack_transposed<kParts>(values, at.k0, at.cols, tile.ev, tile.part, tile.values_t);
  pack_rows<kParts>(keys, at.k0, at.cols, tile.e, kBackwardKvTile, tile.buffer, tile.keys);
}

template <int kParts>
void clear_grad_keys(const TilePosition&, AmxBackwardTile<kParts>& tile) {
  clear_rows(tile.grad_k_t, round_up(tile.e, kTileRows)), clear_rows(tile.grad_v_t, round_up(tile.ev, kTileRows));
}

// to = rows of a * b^T, for the columns of a span.
template <int kParts, Pairs kPairs>
void multiply_rows(PartRows a, const uint8_t* b, int64_t depth, const TilePosition& at, Span columns,
                          Matrix<float> to) {
  const int64_t steps = steps_of(depth);
  multiply<kParts, kPairs>({.a = a.from(at.skipped),
                            .b = b,
                            .b_steps = steps,
                            .c = to,
                            .row_tiles = ceil_div(at.rows, kTileRows),
                            .panels = over(columns, 16),
                            .steps = {0, steps},
                            .sum = Sum::fresh});
}

template <int kParts>
void multiply_keys(const ForwardCall& forward, const TilePosition& at, const Span* spans,
                          AmxBackwardTile<kParts>& tile) {
  const Span all{0, round_up(at.cols, kStep)};
  const Span columns = spans ? steps_seen(tile.visible, at.rows) : all;
  multiply_rows<kParts, kScorePairs>(tile.queries.q, tile.keys_t, tile.e, at, columns, tile.p);
  scale_rows(tile.p, at.rows, columns, static_cast<float>(forward.scale));
}

template <int kParts>
void multiply_values(const ForwardCall&, const TilePosition& at, AmxBackwardTile<kParts>& tile) {
  multiply_rows<kParts, Pairs::not_last>(tile.queries.grad_out, tile.values_t, tile.ev, at,
                                         steps_seen(tile.visible, at.rows), tile.ds);
}

// Zeros around the scores, up to whole tiles of the product: a program may have written to those columns.
inline void clear_around(const TilePosition& at, Span columns, Matrix<float> scores) {
  for (int64_t r = 0; r < at.rows; r++) fill(scores.row(r) + at.cols, columns.end - at.cols, 0.0f);
  clear_rows(scores.from(at.rows), round_up(at.rows, kStep) - at.rows);
}

// to[c][k] += sum over queries of activations[c][query] * scores[query][k], for the columns of a span.
template <int kParts>
void add_transposed(PartRows activations, int64_t channels, Matrix<float> scores, const TilePosition& at,
                           Span columns, uint8_t* pairs, Matrix<float> to) {
  const int64_t steps = steps_of(at.rows);
  pack_tiles<kParts>(scores, steps, columns, steps, pairs);
  activations.data += at.skipped * 2;
  multiply<kParts>({.a = activations,
                    .b = pairs,
                    .b_steps = steps,
                    .c = to,
                    .row_tiles = ceil_div(channels, kTileRows),
                    .panels = over(columns, 16),
                    .steps = {0, steps},
                    .sum = Sum::onto});
}

template <int kParts>
void add_grad_keys(const ForwardCall&, const TilePosition& at, AmxBackwardTile<kParts>& tile) {
  const Span columns = steps_seen(tile.visible, at.rows);
  clear_around(at, columns, tile.p), clear_around(at, columns, tile.ds);
  add_transposed<kParts>(tile.queries.grad_out_columns, tile.ev, tile.p, at, columns, tile.pairs, tile.grad_v_t);
  add_transposed<kParts>(tile.queries.q_columns, tile.e, tile.ds, at, columns, tile.pairs, tile.grad_k_t);
}

template <int kParts>
void add_grad_queries(const ForwardCall&, const TilePosition& at, AmxBackwardTile<kParts>& tile,
                             Matrix<float> grad_q) {
  const Span columns = steps_seen(tile.visible, at.rows);
  clear_around(at, columns, tile.ds);
  cut_rows<kParts>(tile.ds, round_up(at.rows, kTileRows), columns, tile.ds_rows);
  const int64_t whole = at.rows / kTileRows * kTileRows;
  TileProduct product{.a = tile.ds_rows,
                      .b = tile.keys,
                      .b_steps = steps_of(kBackwardKvTile),
                      .c = grad_q,
                      .row_tiles = whole / kTileRows,
                      .panels = {0, ceil_div(tile.e, 16)},
                      .steps = over(columns, kStep),
                      .sum = Sum::onto};
  multiply<kParts>(product);
  if (whole == at.rows) return;
  product.a = tile.ds_rows.from(whole), product.c = tile.last_rows, product.row_tiles = 1, product.sum = Sum::fresh;
  multiply<kParts>(product);
  add_rows(tile.last_rows, grad_q.from(whole), at.rows - whole);
}

template <int kParts>
void store_grad_keys(const BackwardCall& args, const TilePosition& at,
                     const AmxBackwardTile<kParts>& tile) {
  const int64_t kv_head = at.h / args.forward.group();
  const auto store_rows = [&](Matrix<float> from, const TensorView& to, int64_t columns, double scale) {
    for (int64_t c = 0; c < columns; c += 16)
      for (int64_t r = 0; r < at.cols; r += 16)
        transpose_16x16(from.row(c) + r, from.stride, tile.transposed.row(r) + c, tile.transposed.stride);
    fill(tile.scales, at.cols, static_cast<float>(scale));
    narrow_rows(tile.transposed, tile.scales, at.cols, columns, HeadView(to, at.b, kv_head), at.k0);
  };
  store_rows(tile.grad_k_t, args.grad_k, tile.e, args.forward.scale);
  store_rows(tile.grad_v_t, args.grad_v, tile.ev, 1);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
