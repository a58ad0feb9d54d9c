// SPDX-License-Identifier: Apache-2.0
// The forward on the tile unit. K and V are packed once per call, as tiles. A task is a tile of queries of one head, as
// in forward.hpp, processed in blocks of 32 queries by 256 keys. The tile unit leaves the vector units idle: while it
// multiplies the scores of one block, they compute the softmax of the block before, whose values are then added. (A
// pipeline one block deeper took 1.00 to 1.08 times as long on Sapphire Rapids.)
#pragma once

#include "cpu/attention/amx_tiles.hpp"
#include "cpu/attention/forward.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileKeys = 256, kBlockQueries = 2 * kTileRows;

// K and V of some kv heads: [kv head][tile of keys], keys then values.
template <int kParts>
struct PackedKeys {
  uint8_t* data = nullptr;
  int64_t tiles, max_keys, e, ev;

  LOWBIT_INLINE PackedKeys(const ForwardCall& args, const Tiling& kv)
      : tiles(kv.count), max_keys(round_up(kv.tile, kStep)), e(args.q.size(3)), ev(args.ev()) {}
  LOWBIT_INLINE int64_t key_bytes() const { return max_keys / 16 * steps_of(e) * kParts * kTileBytes; }
  LOWBIT_INLINE int64_t value_bytes() const { return ceil_div(ev, 16) * steps_of(max_keys) * kParts * kTileBytes; }
  LOWBIT_INLINE int64_t head_bytes() const { return tiles * (key_bytes() + value_bytes()); }
  LOWBIT_INLINE uint8_t* keys(int64_t head, int64_t j) const {
    return data + head * head_bytes() + j * (key_bytes() + value_bytes());
  }
  LOWBIT_INLINE uint8_t* values(int64_t head, int64_t j) const { return keys(head, j) + key_bytes(); }
};

// 32 queries by a tile of keys. Probabilities overwrite the scores of their row.
struct ScoreBlock {
  TilePosition at{};
  const uint8_t* values = nullptr;
  Matrix<float> scores;
  Span spans[kBlockQueries];  // one per row; empty if the row sees nothing
  Span columns{};             // columns seen by any row, in whole steps of the products
  int64_t taken = 0;          // number of rows turned into probabilities
  template <int kParts>
  LOWBIT_INLINE PartRows probabilities() const {
    return {reinterpret_cast<uint8_t*>(scores.data), scores.stride * 4, kParts * kStepBytes, kStepBytes};
  }
  LOWBIT_INLINE int64_t column_steps() const { return (columns.end - columns.begin) / kStep; }
  LOWBIT_INLINE int64_t tile_rows() const { return round_up(at.rows, kTileRows); }
};

template <int kParts>
struct AmxForwardTile {
  PartRows q;
  ScoreBlock blocks[2];
  Matrix<float> out;
  RunningSoftmax<float> softmax;
  Visible<float> visible;
  float* factor;
  Programs<float> programs;

  LOWBIT_INLINE AmxForwardTile(const ForwardCall& args, int64_t q_tile, TileArena& arena)
      : programs(args, q_tile, kTileKeys, arena) {
    const int64_t e = args.q.size(3), ev = args.ev(), rows = q_tile + kBlockQueries;  // tiles extend past the end
    q = part_rows<kParts>(rows, e, arena);
    for (ScoreBlock& block : blocks) block.scores = arena.matrix<float>(kBlockQueries, kTileKeys);
    out = arena.matrix<float>(rows, ev);
    const bool scaled_first = args.scale <= 0 || args.score_mod || args.mask;
    softmax = {.base = arena.array<float>(q_tile),
               .largest = arena.array<float>(q_tile),
               .sums = arena.array<float>(16 * q_tile),
               .out = out,
               .columns = round_up(ev, 16),
               .keeps_largest = static_cast<bool>(args.max_scores),
               .scale = scaled_first ? 1.0f : static_cast<float>(args.scale)};
    visible = visible_memory<float>(args, kBlockQueries, kTileKeys, arena);
    factor = arena.array<float>(larger(q_tile, kTileKeys));
  }
};

// The probabilities of a row, cut into parts, for all columns of the product.
template <int kParts>
LOWBIT_INLINE void take_row(const ForwardCall& args, const ScoreBlock& block, int64_t r,
                            const RunningSoftmax<float>& softmax, const AmxForwardTile<kParts>& tile) {
  const Span span = block.spans[r], all = block.columns;
  float* row = block.scores.row(r);
  fill(row + all.begin, span.begin - all.begin, kMinusInfinity<float>);
  fill(row + span.end, all.end - span.end, kMinusInfinity<float>);
  uint8_t* to = block.probabilities<kParts>().row(r) + all.begin / kStep * kParts * kStepBytes;
  if (args.dropout_p > 0) {
    softmax_row(softmax, r, row, all);
    drop_probabilities(args, RowBlock(block.at, static_cast<int>(r), 1).at, block.scores.from(r), tile.factor);
    for (int64_t c = all.begin; c < all.end; c += kStep, to += kParts * kStepBytes)
      cut_rounded<kParts>(load(row + c), load(row + c + 16), to);
    return;
  }
  const f32x16 origin = follow_largest(softmax, r, row, all), scale = set1(softmax.scale);
  f32x16 total = load(softmax.sums + 16 * r);
  for (int64_t c = all.begin; c < all.end; c += kStep, to += kParts * kStepBytes) {
    const f32x16 first = e_to_the(fma(load(row + c), scale, origin)),
                 second = e_to_the(fma(load(row + c + 16), scale, origin));
    total = add(add(total, first), second);
    cut_rounded<kParts>(first, second, to);
  }
  store(softmax.sums + 16 * r, total);
}

// The next `count` rows of a block; further rows of the product become zeros.
template <int kParts>
[[gnu::noinline]] void take_rows(const ForwardCall& args, ScoreBlock& block, int64_t count,
                                 const AmxForwardTile<kParts>& tile) {
  if (block.taken == block.at.rows) return;
  const RunningSoftmax<float> softmax = tile.softmax.from(block.at.skipped);
  for (const int64_t end = smaller(block.at.rows, block.taken + count); block.taken < end; block.taken++)
    take_row<kParts>(args, block, block.taken, softmax, tile);
  if (block.taken == block.at.rows) clear_rows(block.scores.from(block.taken), block.tile_rows() - block.taken);
}

// Finishes a block: adds its probabilities times values to its rows of the result.
template <int kParts>
void finish_block(const ForwardCall& args, const PackedKeys<kParts>& packed, ScoreBlock& block,
                  const AmxForwardTile<kParts>& tile) {
  if (block.at.rows == 0) return;
  take_rows<kParts>(args, block, block.at.rows, tile);
  multiply<kParts>({.a = block.probabilities<kParts>(),
                    .b = block.values,
                    .b_steps = steps_of(packed.max_keys),
                    .c = tile.out.from(block.at.skipped),
                    .row_tiles = ceil_div(block.at.rows, kTileRows),
                    .panels = {0, ceil_div(packed.ev, 16)},
                    .steps = over(block.columns, kStep),
                    .sum = Sum::onto});
  block.at.rows = 0;
}

LOWBIT_INLINE void start_block(ScoreBlock& block, const TilePosition& at, const Visible<float>& visible,
                               const uint8_t* values) {
  block.at = at, block.values = values, block.taken = 0, block.columns = steps_seen(visible, at.rows);
  for (int64_t r = 0; r < at.rows; r++) block.spans[r] = {block.columns.begin, block.columns.begin};
  visible.for_each_row(at.rows, [&](int64_t r, Span span) { block.spans[r] = span; });
}

// One tile of queries. head: index among the packed heads.
template <int kParts>
void amx_forward_task(const ForwardCall& args, const Tilings& tilings, const PackedKeys<kParts>& packed,
                      AmxForwardTile<kParts>& tile, int64_t b, int64_t h, int64_t head, int64_t i) {
  const TilePosition all{b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
  cut_rows<kParts>(HeadView(args.q, b, h), all.q0, all.rows, packed.e, tile.q);
  start_softmax(tile.softmax, all.rows);
  const int64_t steps = steps_of(packed.e);
  ScoreBlock *next = &tile.blocks[0], *last = &tile.blocks[1];
  last->at.rows = 0;
  TilePosition at;
  for (int64_t j = tilings.kv.count - 1; j >= 0; j--) {
    if (!tilings.visit(args, b, h, i, j, at)) continue;
    Upcoming modifying{modifying_rows(args, at, tile.programs, next->scores),
                       ceil_div(kBlockQueries, larger(1, kTileKeys / 32 * steps))};
    for (int first = 0; first < at.rows; first += kBlockQueries) {
      const RowBlock block(at, first, kBlockQueries);
      if (!find_visible(args, block, tile.programs, tile.visible)) continue;
      start_block(*next, block.at, tile.visible, packed.values(head, j));
      const int64_t share = ceil_div(last->at.rows, larger(1, next->column_steps() * steps));
      multiply<kParts, kScorePairs>({.a = tile.q.from(block.at.skipped),
                                     .b = packed.keys(head, j),
                                     .b_steps = steps,
                                     .c = next->scores,
                                     .row_tiles = ceil_div(block.at.rows, kTileRows),
                                     .panels = over(next->columns, 16),
                                     .steps = {0, steps},
                                     .sum = Sum::fresh},
                                    [&] {
                                      modifying.fetch();
                                      take_rows<kParts>(args, *last, share, tile);
                                    });
      if (tile.softmax.scale == 1 && args.scale != 1)
        scale_rows(next->scores, block.at.rows, next->columns, static_cast<float>(args.scale));
      modify_visible(args, block, tile.programs, tile.visible, next->scores);
      finish_block(args, packed, *last, tile);
      ScoreBlock* const done = last;
      last = next, next = done;
    }
  }
  finish_block(args, packed, *last, tile);
  finish_rows(args, all, tile.softmax, tile.factor);
}

template <int kParts>
void pack_keys(const ForwardCall& args, const Tiling& kv, const PackedKeys<kParts>& packed, int64_t first,
               int64_t heads, int threads) {
  parallel_for(heads * kv.count, threads, [&](int64_t task) {
    const int64_t head = task / kv.count, j = task % kv.count;
    const int64_t b = (first + head) / args.kv_heads(), h = (first + head) % args.kv_heads();
    TileArena arena;
    part_rows<kParts>(kTileRows, packed.e, arena), arena.matrix<float>(kStep, larger(packed.e, packed.ev));
    const Scratch memory(arena.bytes);
    arena = {memory.arena()};
    const PartRows rows = part_rows<kParts>(kTileRows, packed.e, arena);
    const Matrix<float> buffer = arena.matrix<float>(kStep, larger(packed.e, packed.ev));
    pack_transposed<kParts>(keys_of(args, b, h), kv.begin(j), kv.size(j), packed.e, rows, packed.keys(head, j),
                            buffer);
    pack_rows<kParts>(values_of(args, b, h), kv.begin(j), kv.size(j), packed.ev, packed.max_keys, buffer,
                      packed.values(head, j));
  });
}

// Rows per tile of queries: a multiple of a block, few enough for all threads to have tasks.
LOWBIT_INLINE int64_t choose_amx_q_tile(const ForwardCall& args, int threads) {
  int64_t tile = 4 * kBlockQueries;
  while (tile > kBlockQueries && args.batch() * args.heads() * ceil_div(args.q_length(), tile) < 4 * threads) tile /= 2;
  return tile;
}

template <int kParts>
void attention_forward_amx(const ForwardCall& args) {
  const int threads = threads_for_attention(args);
  const Tilings tilings(args, choose_amx_q_tile(args, threads), kTileKeys);
  PackedKeys<kParts> packed(args, tilings.kv);
  const int64_t kv_heads = args.batch() * args.kv_heads(), group = args.group();
  const int64_t at_once = smaller(kv_heads, larger(1, kMaxPackedBytes / larger(1, packed.head_bytes())));
  const Scratch keys(at_once * packed.head_bytes());
  packed.data = keys.as<uint8_t>();
  for (int64_t first = 0; first < kv_heads; first += at_once) {
    const int64_t heads = smaller(at_once, kv_heads - first);
    pack_keys(args, tilings.kv, packed, first, heads, threads);
    parallel_for(heads * group * tilings.q.count, threads, [&](int64_t task) {
      TileArena arena;
      AmxForwardTile<kParts>(args, tilings.q.tile, arena);
      const Scratch memory(arena.bytes);
      arena = {memory.arena()};
      AmxForwardTile<kParts> tile(args, tilings.q.tile, arena);
      const TileUnit unit(kStepBytes);
      const int64_t head = task / tilings.q.count, at = first * group + head,
                    i = tilings.q.count - 1 - task % tilings.q.count;  // under causality the last tiles take longest
      amx_forward_task(args, tilings, packed, tile, at / args.heads(), at % args.heads(), head / group, i);
    });
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
