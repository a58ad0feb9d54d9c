// SPDX-License-Identifier: Apache-2.0
// One tile of the backward, 64 queries by 128 keys: computes, from q, k, v, grad_out, lse and D, the probabilities p,
// the gradient ds of the raw scores, and their contributions to the gradients (formulas and choice of tiles:
// backward.hpp). Only scores that some query may see are computed.
#pragma once

#include "core/scratch.hpp"
#include "cpu/attention/visible.hpp"
#include "cpu/attention/visit.hpp"
#include "cpu/attention/captured_gradients.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kBackwardKvTile = 128;

// grad_q is summed over the tiles of a chunk of keys, then over the chunks. At most eight, as each has its own float32
// grad_q if threads share a head. If a mask leaves few scores, adding whole copies of grad_q would take too long: then
// one chunk has all keys.
struct KeyChunks {
  int64_t tiles, each, count;
  LOWBIT_INLINE KeyChunks(const ForwardCall& args, int64_t tiles)
      : tiles(tiles), each(args.mask_mod || args.blocks.classes ? larger(1, tiles) : larger(8, ceil_div(tiles, 8))),
        count(ceil_div(tiles, each)) {}
  LOWBIT_INLINE int64_t begin(int64_t chunk) const { return chunk * each; }
  LOWBIT_INLINE int64_t end(int64_t chunk) const { return smaller(tiles, (chunk + 1) * each); }
};

// The part of a tile that is independent of the matrix products' implementation; score_rows: rows of memory for scores,
// at least those of a tile of queries.
template <class T>
struct BackwardScores {
  using Real = T;
  Matrix<T> p, ds;                                // probabilities after dropout; gradient of the raw scores
  Matrix<T> grad_q, grad_q_part;  // rows of a tile of queries, or of a whole kv head; one chunk's share
  T *lse, *delta, *rest, *factor, *scales;
  Matrix<T> raw;                                  // scores before score_mod
  Visible<T> visible;
  Programs<T> programs;
  ScoreMachine<T> reverse;                        // backward program of score_mod
  const CapturedGradient* captured = nullptr;     // accumulators of the gradients of captured tensors
  bool adds_grad_mask = false;

  LOWBIT_INLINE BackwardScores(const ForwardCall& args, int64_t q_tile, int64_t score_rows,
                               int64_t grad_q_rows, const ScorePlan ScoreProgram::* reverse_plan, TileArena& arena)
      : programs(args, q_tile, kBackwardKvTile, arena),
        reverse(machine_for<T>(args.score_mod, reverse_plan, q_tile, kBackwardKvTile, arena)) {
    const int64_t e = args.q.size(3), chunks = KeyChunks(args, ceil_div(args.kv_length(), kBackwardKvTile)).count;
    if (reverse.call) raw = arena.matrix<T>(q_tile, kBackwardKvTile);
    grad_q = arena.matrix<T>(grad_q_rows, e), grad_q_part = arena.matrix<T>(chunks > 1 ? grad_q_rows : 0, e);
    p = arena.matrix<T>(score_rows, kBackwardKvTile), ds = arena.matrix<T>(score_rows, kBackwardKvTile);
    lse = arena.array<T>(q_tile), delta = arena.array<T>(q_tile), rest = arena.array<T>(q_tile),
    factor = arena.array<T>(kBackwardKvTile);
    scales = arena.array<T>(kBackwardKvTile);
    visible = visible_memory<T>(args, q_tile, kBackwardKvTile, arena);
  }
};

// A tile that uses the products of cpu/tile_products.hpp.
template <class T>
struct BackwardTile : BackwardScores<T> {
  Matrix<T> q, grad_out;                          // q times scale
  Matrix<T> keys, keys_t, values_t, buffer;
  Matrix<T> grad_k, grad_v;                       // gradients of one tile of keys
  Span* seeing;                                   // one per tile of rows of grad_k

  LOWBIT_INLINE BackwardTile(const ForwardCall& args, const Tiling& queries, int64_t grad_q_rows,
                             const ScorePlan ScoreProgram::* reverse_plan, TileArena& arena)
      : BackwardScores<T>(args, queries.tile, queries.tile, grad_q_rows, reverse_plan, arena) {
    const int64_t e = args.q.size(3), ev = args.v.size(3);
    q = arena.matrix<T>(queries.tile, e), grad_out = arena.matrix<T>(queries.tile, ev);
    keys = arena.matrix<T>(kBackwardKvTile, e), buffer = arena.matrix<T>(16, larger(e, ev));
    keys_t = arena.matrix<T>(round_up(e, 16), kBackwardKvTile),
    values_t = arena.matrix<T>(round_up(ev, 16), kBackwardKvTile);
    grad_k = arena.matrix<T>(kBackwardKvTile, e), grad_v = arena.matrix<T>(kBackwardKvTile, ev);
    seeing = arena.array<Span>(product_tiles(kBackwardKvTile).count);
  }
};

template <class T>
void copy_rows(Matrix<T> from, Matrix<T> to, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += 16) store(to.row(r) + c, load(from.row(r) + c));
}

template <class T>
void add_rows(Matrix<T> from, Matrix<T> to, int64_t rows) {
  for (int64_t i = 0; i < rows * to.stride; i += 16) store(to.data + i, add(load(to.data + i), load(from.data + i)));
}

// Per-row numbers besides lse, [B, Hq, L]: D, and the rest of the log-sum-exp, which is rounded away when lse is
// dominated by a large score: lse of a row masked with finfo.min is exactly finfo.min.
//   p = exp(s - lse - rest)
template <class T>
struct RowStatistics {
  T *delta, *rest;
  LOWBIT_INLINE RowStatistics from(int64_t row) const { return {delta + row, rest + row}; }
};

// From this magnitude on, at most 13 bits of lse are after the binary point, and rest is computed.
template <class T>
constexpr T kLargeLse = sizeof(T) == 8 ? static_cast<T>(1ll << 39) : static_cast<T>(1 << 10);
template <class T>
LOWBIT_INLINE bool has_rest(T lse) {
  const T magnitude = lse < 0 ? -lse : lse;
  return magnitude >= kLargeLse<T> && magnitude <= std::numeric_limits<T>::max();
}

// D for the rows of a head, and rest = 0; true if some row has a rest.
template <class T>
bool row_deltas(const BackwardCall& args, int64_t head, const RowStatistics<T>& rows) {
  const ForwardCall& forward = args.forward;
  const int64_t length = forward.q_length(), ev = forward.v.size(3), b = head / forward.heads(),
                h = head % forward.heads();
  const HeadView out(forward.out, b, h), grad_out(args.grad_out, b, h);
  const T* grad_lse = args.grad_lse ? args.grad_lse.as<const T>() + head * length : nullptr;
  const T* lse = forward.lse.template as<const T>() + head * length;
  bool some_rest = false;
  with_elements<T>(out.dtype, [&](auto* tag) {
    using E = std::remove_cvref_t<decltype(*tag)>;
    for (int64_t r = 0; r < length; r++) {
      const E *o = reinterpret_cast<const E*>(out.data) + r * out.stride,
              *g = reinterpret_cast<const E*>(grad_out.data) + r * grad_out.stride;
      auto total = set1(T{0});
      int64_t c = 0;
      for (; c + 16 <= ev; c += 16) total = fma(load16(o + c), load16(g + c), total);
      if (c < ev) {
        E last_o[16] = {}, last_g[16] = {};
        for (int64_t i = c; i < ev; i++) last_o[i - c] = o[i], last_g[i - c] = g[i];
        total = fma(load16(last_o), load16(last_g), total);
      }
      rows.delta[r] = sum(total) - (grad_lse ? grad_lse[r] : T{0}), rows.rest[r] = 0;
      some_rest |= has_rest(lse[r]);
    }
  });
  return some_rest;
}

// lse, D and rest of a tile of queries.
template <class T>
void load_statistics(const ForwardCall& forward, const TilePosition& at, const RowStatistics<T>& statistics,
                     BackwardScores<T>& tile) {
  const int64_t first = (at.b * forward.heads() + at.h) * forward.q_length() + at.q0;
  for (int64_t r = 0; r < at.rows; r++) {
    const T lse = forward.lse.template as<const T>()[first + r];
    tile.lse[r] = lse == kMinusInfinity<T> ? T{0} : lse;
    tile.delta[r] = statistics.delta[first + r], tile.rest[r] = statistics.rest[first + r];
  }
}

// Tile i of the queries of a head: q and grad_out widened, lse, D, rest.
template <class T>
void load_queries(const BackwardCall& args, const TilePosition& at, int64_t, const RowStatistics<T>& statistics,
                  BackwardTile<T>& tile) {
  const ForwardCall& forward = args.forward;
  widen_rows(HeadView(forward.q, at.b, at.h), at.q0, at.rows, forward.q.size(3), static_cast<T>(forward.scale), tile.q);
  widen_rows(HeadView(args.grad_out, at.b, at.h), at.q0, at.rows, forward.v.size(3), T{1}, tile.grad_out);
  load_statistics(forward, at, statistics, tile);
}

// A tile of keys, with gradients of zero.
template <class T>
void load_keys(const ForwardCall& args, const TilePosition& at, BackwardTile<T>& tile) {
  const HeadView keys(args.k, at.b, at.h / args.group()), values(args.v, at.b, at.h / args.group());
  transpose_rows(keys, at.k0, at.cols, args.q.size(3), tile.keys_t, tile.buffer);
  transpose_rows(values, at.k0, at.cols, args.v.size(3), tile.values_t, tile.buffer);
  widen_rows(keys, at.k0, at.cols, args.q.size(3), T{1}, tile.keys);
}

template <class T>
void clear_grad_keys(const TilePosition& at, BackwardTile<T>& tile) {
  clear_rows(tile.grad_k, at.cols), clear_rows(tile.grad_v, at.cols);
}

// tile.p = scale * q k^T
template <class T>
void multiply_keys(const ForwardCall& forward, const TilePosition& at, const Span* spans, BackwardTile<T>& tile) {
  multiply(tile.q.from(at.skipped), tile.keys_t, tile.p, {at.rows, at.cols, forward.q.size(3)},
           {.columns = spans});
}

// tile.ds = grad_out v^T
template <class T>
void multiply_values(const ForwardCall& forward, const TilePosition& at, BackwardTile<T>& tile) {
  multiply(tile.grad_out.from(at.skipped), tile.values_t, tile.ds, {at.rows, at.cols, forward.v.size(3)},
           {.columns = tile.visible.spans});
}

// grad_mask += ds per element of the stored mask; if the mask is broadcast along k, a row adds its sum.
template <class T>
void add_grad_mask(const TensorView& grad, const TilePosition& at, Matrix<T> ds) {
  T* base =
      grad.as<T>() + at.b * grad.stride[0] + at.h * grad.stride[1] + at.q0 * grad.stride[2] + at.k0 * grad.stride[3];
  for (int64_t r = 0; r < at.rows; r++)
    for (int64_t c = 0; c < at.cols; c++) base[r * grad.stride[2] + c * grad.stride[3]] += ds.row(r)[c];
}

// The visible scores, as the softmax took them, in tile.p.
template <class Tile>
void load_scores(const ForwardCall& forward, const TilePosition& at, Tile& tile) {
  // All columns if a program runs: the derivative of score_mod may be infinite at 0, the value of scores not computed.
  multiply_keys(forward, at, tile.reverse.call ? nullptr : tile.visible.spans, tile);
  if (tile.reverse.call) copy_rows(tile.p, tile.raw, at.rows, tile.visible.all.end);
  modify_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible, tile.p);
}

// tile.p and tile.ds, 0 outside tile.visible, from the loaded queries and keys.
template <class Tile>
void score_gradients(const BackwardCall& args, const TilePosition& at, Tile& tile) {
  using T = typename Tile::Real;
  const ForwardCall& forward = args.forward;
  const Visible<T>& visible = tile.visible;
  load_scores(forward, at, tile);
  multiply_values(forward, at, tile);
  visible.for_each_row(at.rows, [&](int64_t r, Span span) {
    T *p = tile.p.row(r), *ds = tile.ds.row(r);
    const int64_t row = at.skipped + r;
    const auto lse = set1(tile.lse[row]), rest = set1(tile.rest[row]), delta = set1(tile.delta[row]);
    if (forward.dropout_p > 0) {
      dropout_factors(forward, at, r, tile.factor);
      for (int64_t c = span.begin; c < span.end; c += 16) {
        const auto x = e_to_the(sub(sub(load(p + c), lse), rest)), kept = load(tile.factor + c);
        store(ds + c, mul(x, sub(mul(load(ds + c), kept), delta)));
        store(p + c, mul(x, kept));
      }
    } else {
      for (int64_t c = span.begin; c < span.end; c += 16) {
        const auto x = e_to_the(sub(sub(load(p + c), lse), rest));  // not s - (lse + rest), which would round rest away
        store(ds + c, mul(x, sub(load(ds + c), delta)));
        store(p + c, x);
      }
    }
  });
  clear_hidden(visible, at.rows, tile.p), clear_hidden(visible, at.rows, tile.ds);
  if (tile.adds_grad_mask) add_grad_mask(args.grad_mask, at, tile.ds);
  if (tile.reverse.call)
    run_machine(tile.reverse, score_tile(at, tile.raw), tile.ds.data, tile.ds.stride, tile.captured);
}

template <class T>
void add_grad_keys(const ForwardCall& args, const TilePosition& at, BackwardTile<T>& tile) {
  const Span* seeing = find_seeing(tile.visible, at.rows, at.cols, tile.seeing);
  multiply(transposed(tile.p), tile.grad_out.from(at.skipped), tile.grad_v, {at.cols, args.v.size(3), at.rows},
           {.sum = Sum::onto, .depth = seeing});
  multiply(transposed(tile.ds), tile.q.from(at.skipped), tile.grad_k, {at.cols, args.q.size(3), at.rows},
           {.sum = Sum::onto, .depth = seeing});
}

template <class T>
void add_grad_queries(const ForwardCall& args, const TilePosition& at, const BackwardTile<T>& tile,
                      Matrix<T> grad_q) {
  multiply(tile.ds, tile.keys, grad_q, {at.rows, args.q.size(3), at.cols},
           {.sum = Sum::onto, .depth = tile.visible.spans});
}

template <class T>
void store_grad_queries(const BackwardCall& args, const TilePosition& at, Matrix<T> grad_q) {
  T scales[kBackwardQTile];
  fill(scales, at.rows, static_cast<T>(args.forward.scale));
  narrow_rows(grad_q, scales, at.rows, args.forward.q.size(3), HeadView(args.grad_q, at.b, at.h), at.q0);
}

template <class T>
void store_grad_keys(const BackwardCall& args, const TilePosition& at, const BackwardTile<T>& tile) {
  const int64_t kv_head = at.h / args.forward.group();
  fill(tile.scales, at.cols, T{1});
  narrow_rows(tile.grad_k, tile.scales, at.cols, args.forward.q.size(3), HeadView(args.grad_k, at.b, kv_head), at.k0);
  narrow_rows(tile.grad_v, tile.scales, at.cols, args.forward.v.size(3), HeadView(args.grad_v, at.b, kv_head), at.k0);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
