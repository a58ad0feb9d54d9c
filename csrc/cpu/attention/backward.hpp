// SPDX-License-Identifier: Apache-2.0
// Backward, from q, k, v, out and lse alone. With D = sum over Ev of grad_out * out - grad_lse, per tile:
//   p = exp(s - lse);  dp = dropout(grad_out v^T);  ds = p (dp - D), through score_mod back to the raw scores
//   grad_v += dropout(p)^T grad_out;  grad_k += scale * ds^T q;  grad_q += scale * ds k
// of which only what some query may see is computed (visible.hpp).
// Where there are enough kv heads for all threads a task is a kv head (five products a tile). Else one pass over tiles of keys makes grad_k and
// grad_v and another over tiles of queries makes grad_q (seven products), so that one head uses every core. Nothing is added by two threads, and
// every element is summed in the same order in both ways: the bits do not depend on threads.
// Keys stay and queries pass, not the other way round: a tile of queries is half as large and need not be transposed.
#pragma once

#include "core/scratch.hpp"
#include "cpu/attention/visible.hpp"
#include "cpu/attention/visit.hpp"
#include "ops/score_gradient.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kBackwardKvTile = 128;

template <class T>
struct BackwardTile {
  Matrix<T> q, grad_out;                          // q times scale
  Matrix<T> keys, keys_t, values_t, buffer;
  Matrix<T> p, ds;                                // probabilities after dropout; gradient of the raw scores
  Matrix<T> grad_q;                               // of one tile of queries, or of all that share a kv head
  Matrix<T> grad_k, grad_v;                       // of one tile of keys
  T *lse, *delta, *factor, *scales;
  Matrix<T> raw;                                  // scores before score_mod
  Visible<T> visible;
  Span* seeing;                                   // per tile of rows of grad_k
  Programs<T> programs;
  ScoreMachine<T> reverse;                        // of score_mod
  const CapturedGradient* captured = nullptr;     // where it adds the gradients of captured tensors
  bool adds_grad_mask = false;

  LOWBIT_INLINE BackwardTile(const AttentionForwardArgs& args, int64_t q_tile, int64_t grad_q_rows, const ScorePlan ScoreProgram::*reverse_plan, Arena& arena)
      : programs(args, q_tile, kBackwardKvTile, arena), reverse(machine_for<T>(args.score_mod, reverse_plan, q_tile, kBackwardKvTile, arena)) {
    if (reverse.call) raw = arena.matrix<T>(q_tile, kBackwardKvTile);
    const int64_t e = args.q.size(3), ev = args.v.size(3);
    q = arena.matrix<T>(q_tile, e), grad_out = arena.matrix<T>(q_tile, ev), grad_q = arena.matrix<T>(grad_q_rows, e);
    keys = arena.matrix<T>(kBackwardKvTile, e), buffer = arena.matrix<T>(16, larger(e, ev));
    keys_t = arena.matrix<T>(round_up(e, 16), kBackwardKvTile), values_t = arena.matrix<T>(round_up(ev, 16), kBackwardKvTile);
    p = arena.matrix<T>(q_tile, kBackwardKvTile), ds = arena.matrix<T>(q_tile, kBackwardKvTile);
    grad_k = arena.matrix<T>(kBackwardKvTile, e), grad_v = arena.matrix<T>(kBackwardKvTile, ev);
    lse = arena.array<T>(q_tile), delta = arena.array<T>(q_tile), factor = arena.array<T>(kBackwardKvTile);
    scales = arena.array<T>(larger(q_tile, kBackwardKvTile));
    visible = visible_memory<T>(args, q_tile, kBackwardKvTile, arena), seeing = arena.array<Span>(RowTiles(kBackwardKvTile, kFloatRows).count);
  }
};

template <class T>
void copy_rows(Matrix<T> from, Matrix<T> to, int64_t rows, int64_t columns) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += 16) store(to.row(r) + c, load(from.row(r) + c));
}

// D of every row, [B, Hq, L].
template <class T>
void row_deltas(const AttentionBackwardArgs& args, int64_t head, T* delta) {
  const AttentionForwardArgs& forward = args.forward;
  const int64_t length = forward.q_length(), ev = forward.v.size(3), b = head / forward.heads(), h = head % forward.heads();
  const HeadView out(forward.out, b, h), grad_out(args.grad_out, b, h);
  const T* grad_lse = args.grad_lse ? args.grad_lse.as<const T>() + head * length : nullptr;
  with_elements<T>(out.dtype, [&](auto* tag) {
    using E = std::remove_cvref_t<decltype(*tag)>;
    for (int64_t r = 0; r < length; r++) {
      const E *o = reinterpret_cast<const E*>(out.data) + r * out.stride, *g = reinterpret_cast<const E*>(grad_out.data) + r * grad_out.stride;
      auto total = set1(T{0});
      int64_t c = 0;
      for (; c + 16 <= ev; c += 16) total = fma(load16(o + c), load16(g + c), total);
      if (c < ev) {
        E last_o[16] = {}, last_g[16] = {};
        for (int64_t i = c; i < ev; i++) last_o[i - c] = o[i], last_g[i - c] = g[i];
        total = fma(load16(last_o), load16(last_g), total);
      }
      delta[r] = sum(total) - (grad_lse ? grad_lse[r] : T{0});
    }
  });
}

// A tile of queries: q and grad_out widened, lse, D.
template <class T>
void load_queries(const AttentionBackwardArgs& args, const TilePlace& at, const T* delta, BackwardTile<T>& tile) {
  const AttentionForwardArgs& forward = args.forward;
  widen_rows(HeadView(forward.q, at.b, at.h), at.q0, at.rows, forward.q.size(3), static_cast<T>(forward.scale), tile.q);
  widen_rows(HeadView(args.grad_out, at.b, at.h), at.q0, at.rows, forward.v.size(3), T{1}, tile.grad_out);
  const int64_t first = (at.b * forward.heads() + at.h) * forward.q_length() + at.q0;
  for (int64_t r = 0; r < at.rows; r++) {
    const T lse = forward.lse.template as<const T>()[first + r];
    tile.lse[r] = lse == kMinusInfinity<T> ? T{0} : lse;
    tile.delta[r] = delta[first + r];
  }
}

template <class T>
void load_keys(const AttentionForwardArgs& args, const TilePlace& at, BackwardTile<T>& tile) {
  const HeadView keys(args.k, at.b, at.h / args.group()), values(args.v, at.b, at.h / args.group());
  transpose_rows(keys, at.k0, at.cols, args.q.size(3), tile.keys_t, tile.buffer);
  transpose_rows(values, at.k0, at.cols, args.v.size(3), tile.values_t, tile.buffer);
  widen_rows(keys, at.k0, at.cols, args.q.size(3), T{1}, tile.keys);
}

// grad_mask += ds for the mask's own elements; where the mask is broadcast along k a row adds its sum.
template <class T>
void add_grad_mask(const TensorView& grad, const TilePlace& at, Matrix<T> ds) {
  T* base = grad.as<T>() + at.b * grad.stride[0] + at.h * grad.stride[1] + at.q0 * grad.stride[2] + at.k0 * grad.stride[3];
  for (int64_t r = 0; r < at.rows; r++)
    for (int64_t c = 0; c < at.cols; c++) base[r * grad.stride[2] + c * grad.stride[3]] += ds.row(r)[c];
}

// tile.p and tile.ds, 0 outside of tile.visible, from the queries and keys that are loaded.
template <class T>
void score_gradients(const AttentionBackwardArgs& args, const TilePlace& at, BackwardTile<T>& tile) {
  const AttentionForwardArgs& forward = args.forward;
  const Visible<T>& visible = tile.visible;
  // The derivative of score_mod may be infinite at a score of 0, which is what a program would find where nothing was multiplied.
  multiply(rows_of(tile.q.from(at.skipped)), tile.keys_t, tile.p, at.rows, at.cols, forward.q.size(3), {.columns = tile.reverse.call ? nullptr : visible.spans});
  if (tile.reverse.call) copy_rows(tile.p, tile.raw, at.rows, visible.all.end);
  modify_visible(forward, RowBlock(at, 0, at.rows), tile.programs, visible, tile.p);
  multiply(rows_of(tile.grad_out.from(at.skipped)), tile.values_t, tile.ds, at.rows, at.cols, forward.v.size(3), {.columns = visible.spans});
  const auto log2e = set1(static_cast<T>(kLog2e));
  visible.for_each_row(at.rows, [&](int64_t r, Span span) {
    T *p = tile.p.row(r), *ds = tile.ds.row(r);
    const auto lse = set1(tile.lse[at.skipped + r]), delta = set1(tile.delta[at.skipped + r]);
    if (forward.dropout_p > 0) {
      dropout_factors(forward, at, r, tile.factor);
      for (int64_t c = span.begin; c < span.end; c += 16) {
        const auto x = exp2(mul(sub(load(p + c), lse), log2e)), kept = load(tile.factor + c);
        store(ds + c, mul(x, sub(mul(load(ds + c), kept), delta)));
        store(p + c, mul(x, kept));
      }
    } else {
      for (int64_t c = span.begin; c < span.end; c += 16) {
        const auto x = exp2(mul(sub(load(p + c), lse), log2e));  // not fma(s, log2e, -lse * log2e): that rounds once more
        store(ds + c, mul(x, sub(load(ds + c), delta)));
        store(p + c, x);
      }
    }
  });
  clear_hidden(visible, at.rows, tile.p), clear_hidden(visible, at.rows, tile.ds);
  if (tile.adds_grad_mask) add_grad_mask(args.grad_mask, at, tile.ds);
  if (tile.reverse.call) run_machine(tile.reverse, score_tile(at, tile.raw), tile.ds.data, tile.ds.stride, tile.captured);
}

template <class T>
void add_grad_keys(const AttentionForwardArgs& args, const TilePlace& at, BackwardTile<T>& tile) {
  const Span* seeing = find_seeing(tile.visible, at.rows, at.cols, tile.seeing);
  multiply(columns_of(tile.p), tile.grad_out.from(at.skipped), tile.grad_v, at.cols, args.v.size(3), at.rows, {.sum = Sum::onto, .depth = seeing});
  multiply(columns_of(tile.ds), tile.q.from(at.skipped), tile.grad_k, at.cols, args.q.size(3), at.rows, {.sum = Sum::onto, .depth = seeing});
}

template <class T>
void add_grad_queries(const AttentionForwardArgs& args, const TilePlace& at, const BackwardTile<T>& tile, Matrix<T> grad_q) {
  multiply(rows_of(tile.ds), tile.keys, grad_q, at.rows, args.q.size(3), at.cols, {.sum = Sum::onto, .depth = tile.visible.spans});
}

template <class T>
void store_grad_queries(const AttentionBackwardArgs& args, const TilePlace& at, const BackwardTile<T>& tile, Matrix<T> grad_q) {
  fill(tile.scales, at.rows, static_cast<T>(args.forward.scale));
  narrow_rows(grad_q, tile.scales, at.rows, args.forward.q.size(3), HeadView(args.grad_q, at.b, at.h), at.q0);
}

template <class T>
void store_grad_keys(const AttentionBackwardArgs& args, const TilePlace& at, const BackwardTile<T>& tile) {
  const int64_t kv_head = at.h / args.forward.group();
  fill(tile.scales, at.cols, T{1});
  narrow_rows(tile.grad_k, tile.scales, at.cols, args.forward.q.size(3), HeadView(args.grad_k, at.b, kv_head), at.k0);
  narrow_rows(tile.grad_v, tile.scales, at.cols, args.forward.v.size(3), HeadView(args.grad_v, at.b, kv_head), at.k0);
}

// grad_k and grad_v of one tile of keys, and what it adds to grad_q of the queries of its head: [heads of the group][L], or without memory.
template <class T>
void backward_keys(const AttentionBackwardArgs& args, const Tilings& tilings, const T* delta, BackwardTile<T>& tile, int64_t b, int64_t kv_head,
                   int64_t j, Matrix<T> grad_q) {
  const AttentionForwardArgs& forward = args.forward;
  const int64_t first = kv_head * forward.group();
  const TilePlace all{b, first, 0, tilings.kv.begin(j), 0, tilings.kv.size(j), 0, false};
  load_keys(forward, all, tile);
  clear_rows(tile.grad_k, all.cols), clear_rows(tile.grad_v, all.cols);
  TilePlace at;
  for (int64_t h = first; h < first + forward.group(); h++)
    for (int64_t i = 0; i < tilings.q.count; i++) {
      if (!tilings.visit(forward, b, h, i, j, at) || !find_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible)) continue;
      load_queries(args, {b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false}, delta, tile);
      score_gradients(args, at, tile);
      add_grad_keys(forward, at, tile);
      if (grad_q.data) add_grad_queries(forward, at, tile, grad_q.from((h - first) * tilings.q.length + at.q0));
    }
  store_grad_keys(args, all, tile);
}

// All of one kv head.
template <class T>
void backward_head(const AttentionBackwardArgs& args, const Tilings& tilings, const T* delta, BackwardTile<T>& tile, int64_t b, int64_t kv_head) {
  const int64_t group = args.forward.group(), length = tilings.q.length;
  clear_rows(tile.grad_q, group * length);
  for (int64_t j = 0; j < tilings.kv.count; j++) backward_keys(args, tilings, delta, tile, b, kv_head, j, tile.grad_q);
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < tilings.q.count; i++) {
      const TilePlace all{b, kv_head * group + g, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
      store_grad_queries(args, all, tile, tile.grad_q.from(g * length + all.q0));
    }
}

// grad_q of one tile of queries, and what it adds to grad_mask.
template <class T>
void backward_queries(const AttentionBackwardArgs& args, const Tilings& tilings, const T* delta, BackwardTile<T>& tile, int64_t b, int64_t h,
                      int64_t i) {
  const AttentionForwardArgs& forward = args.forward;
  const TilePlace all{b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
  load_queries(args, all, delta, tile);
  clear_rows(tile.grad_q, all.rows);
  TilePlace at;
  for (int64_t j = 0; j < tilings.kv.count; j++) {
    if (!tilings.visit(forward, b, h, i, j, at) || !find_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible)) continue;
    load_keys(forward, at, tile);
    score_gradients(args, at, tile);
    add_grad_queries(forward, at, tile, tile.grad_q.from(at.skipped));
  }
  store_grad_queries(args, all, tile, tile.grad_q);
}

// Tiles of queries that add to the same elements of grad_mask belong to one task, which takes them in order.
struct QueryTasks {
  int64_t b_tasks, h_tasks, i_tasks, b_each, h_each, i_each;
  LOWBIT_INLINE QueryTasks(const AttentionBackwardArgs& args, int64_t tiles) {
    const AttentionForwardArgs& forward = args.forward;
    const auto shared = [&](int dim) { return args.grad_mask && args.grad_mask.stride[dim] == 0; };
    b_each = shared(0) ? forward.batch() : 1, h_each = shared(1) ? forward.heads() : 1, i_each = shared(2) ? larger(1, tiles) : 1;
    b_tasks = forward.batch() / b_each, h_tasks = forward.heads() / h_each, i_tasks = tiles / i_each;
  }
  template <class F>
  LOWBIT_INLINE void run(int64_t task, F&& f) const {
    const int64_t b0 = task / i_tasks / h_tasks * b_each, h0 = task / i_tasks % h_tasks * h_each, i0 = task % i_tasks * i_each;
    for (int64_t b = b0; b < b0 + b_each; b++)
      for (int64_t h = h0; h < h0 + h_each; h++)
        for (int64_t i = i0; i < i0 + i_each; i++) f(b, h, i);
  }
};

// The sink has dp = 0: ds = -p D.
template <class T>
void add_grad_sink(const AttentionBackwardArgs& args, const T* delta) {
  const AttentionForwardArgs& forward = args.forward;
  const int64_t length = forward.q_length();
  for (int64_t h = 0; h < forward.heads(); h++) {
    double total = 0;
    for (int64_t b = 0; b < forward.batch(); b++)
      for (int64_t r = 0; r < length; r++) {
        const int64_t at = (b * forward.heads() + h) * length + r;
        const double lse = forward.lse.template as<const T>()[at];
        if (lse == kMinusInfinity<double>) continue;
        const double log2_p = (forward.sink.template as<const T>()[h] - lse) * kLog2e;
        total -= __builtin_exp2(log2_p) * delta[at];
      }
    args.grad_sink.template as<T>()[h] = static_cast<T>(total);
  }
}

template <class T, class F>
void run_backward_tasks(const AttentionForwardArgs& args, int64_t tasks, int64_t q_tile, int64_t grad_q_rows, const ScorePlan ScoreProgram::*reverse, F&& f) {
  parallel_for(tasks, threads_for_attention(args), [&](int64_t task) {
    Arena arena;
    BackwardTile<T>(args, q_tile, grad_q_rows, reverse, arena);
    arena = {static_cast<char*>(scratch(Scratch::tile, arena.bytes)), 0};
    BackwardTile<T> tile(args, q_tile, grad_q_rows, reverse, arena);
    f(task, tile);
  });
}

// A pass over tiles of queries for the gradients of captured tensors, in the slices of their plan.
template <class T>
void backward_captured(const AttentionBackwardArgs& args, const Tilings& tilings, const T* delta) {
  const ScoreGradientPlan& plan = *args.captured;
  run_backward_tasks<T>(args.forward, plan.slices(), tilings.q.tile, tilings.q.tile, &ScoreProgram::backward, [&](int64_t slice, BackwardTile<T>& tile) {
    tile.captured = plan.targets(slice);
    for (int64_t n = 0, items = plan.items(slice); n < items; n++) {
      const ScoreGradientItem item = plan.item(slice, n);
      backward_queries(args, tilings, delta, tile, item.b, item.head, item.q);
    }
  });
}

template <class T>
void attention_backward(const AttentionBackwardArgs& args) {
  const AttentionForwardArgs& forward = args.forward;
  const int threads = threads_for_attention(forward);
  const Tilings tilings(forward, kBackwardQTile, kBackwardKvTile);
  const int64_t heads = forward.batch() * forward.heads(), kv_heads = forward.batch() * forward.kv_heads();
  T* delta = static_cast<T*>(scratch(Scratch::activations, heads * forward.q_length() * static_cast<int64_t>(sizeof(T))));
  parallel_for(heads, threads, [&](int64_t head) { row_deltas(args, head, delta + head * forward.q_length()); });
  if (args.grad_sink) add_grad_sink(args, delta);
  // Busy share of the threads if each takes whole heads, against five products where the two passes need seven.
  const bool enough_heads = kv_heads * 7 >= ceil_div(kv_heads, threads) * threads * 5;
  if (enough_heads && !args.grad_mask && !args.captured) {
    run_backward_tasks<T>(forward, kv_heads, tilings.q.tile, forward.group() * tilings.q.length, &ScoreProgram::backward_only, [&](int64_t task, BackwardTile<T>& tile) {
      backward_head(args, tilings, delta, tile, task / forward.kv_heads(), task % forward.kv_heads());
    });
    return;
  }
  run_backward_tasks<T>(forward, kv_heads * tilings.kv.count, tilings.q.tile, 0, &ScoreProgram::backward_only,
                        [&](int64_t task, BackwardTile<T>& tile) {
                          const int64_t head = task / tilings.kv.count;
                          backward_keys(args, tilings, delta, tile, head / forward.kv_heads(), head % forward.kv_heads(), task % tilings.kv.count,
                                        Matrix<T>());
                        });
  if (args.captured) backward_captured(args, tilings, delta);
  if (args.captured && !args.grad_mask) return;
  const QueryTasks tasks(args, tilings.q.count);
  run_backward_tasks<T>(forward, tasks.b_tasks * tasks.h_tasks * tasks.i_tasks, tilings.q.tile, tilings.q.tile, &ScoreProgram::backward_only,
                        [&](int64_t task, BackwardTile<T>& tile) {
                          tile.adds_grad_mask = static_cast<bool>(args.grad_mask);
                          tasks.run(task, [&](int64_t b, int64_t h, int64_t i) { backward_queries(args, tilings, delta, tile, b, h, i); });
                        });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
