// SPDX-License-Identifier: Apache-2.0
// The backward, from q, k, v, out and lse alone. With D = sum over Ev of grad_out * out - grad_lse, per tile:
//   p = exp(s - lse - rest);  dp = dropout(grad_out v^T);  ds = p (dp - D), through score_mod back to the raw scores
//   grad_v += dropout(p)^T grad_out;  grad_k += scale * ds^T q;  grad_q += scale * ds k
// rest: the part of the log-sum-exp that lse has lost to rounding if it is large (RowStatistics).
// If there are enough kv heads for all threads, a task is a kv head, else a chunk of its keys, whose contributions to
// grad_q are added at the end: five products per tile. If these are still too few, and for gradients of masks and
// captured tensors, one pass over tiles of keys computes grad_k and grad_v, and another over tiles of queries grad_q:
// seven products. No element is accumulated by two threads, and every element is summed in the same order in all
// variants, so the bits do not depend on the number of threads.
// The outer loop is over keys, the inner over queries: a tile of queries is half as large, and need not be transposed.
#pragma once

#include "cpu/attention/backward_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// grad_k and grad_v of one tile of keys, and its contribution to grad_q of the queries of its heads: [heads of the
// group][L], or no memory.
template <class Tile, class T>
void backward_keys(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics,
                   Tile& tile, int64_t b, int64_t kv_head, int64_t j, Matrix<T> grad_q) {
  const ForwardCall& forward = args.forward;
  const int64_t first = kv_head * forward.group();
  const TilePosition all{b, first, 0, tilings.kv.begin(j), 0, tilings.kv.size(j), 0, false};
  load_keys(forward, all, tile);
  clear_grad_keys(all, tile);
  TilePosition at;
  for (int64_t h = first; h < first + forward.group(); h++)
    for (int64_t i = 0; i < tilings.q.count; i++) {
      if (!tilings.visit(forward, b, h, i, j, at) ||
          !find_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible))
        continue;
      load_queries(args, {b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false}, i, statistics, tile);
      score_gradients(args, at, tile);
      add_grad_keys(forward, at, tile);
      if (grad_q.data) add_grad_queries(forward, at, tile, grad_q.from((h - first) * tilings.q.length + at.q0));
    }
  store_grad_keys(args, all, tile);
}

// grad_q = sum over chunks; f(chunk, to) adds one chunk's contribution to `to`.
template <class T, class F>
void sum_chunks(const KeyChunks& chunks, int64_t rows, const BackwardScores<T>& tile, F&& f) {
  clear_rows(tile.grad_q, rows);
  for (int64_t chunk = 0; chunk < chunks.count; chunk++) {
    if (chunk > 0) clear_rows(tile.grad_q_part, rows);
    f(chunk, chunk > 0 ? tile.grad_q_part : tile.grad_q);
    if (chunk > 0) add_rows(tile.grad_q_part, tile.grad_q, rows);
  }
}

template <class Tile, class T>
void backward_chunk(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics,
                    Tile& tile, int64_t b, int64_t kv_head, int64_t chunk, Matrix<T> grad_q) {
  const KeyChunks chunks(args.forward, tilings.kv.count);
  for (int64_t j = chunks.begin(chunk); j < chunks.end(chunk); j++)
    backward_keys(args, tilings, statistics, tile, b, kv_head, j, grad_q);
}

// Everything for one kv head.
template <class Tile, class T>
void backward_head(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics,
                   Tile& tile, int64_t b, int64_t kv_head) {
  const int64_t group = args.forward.group(), length = tilings.q.length;
  sum_chunks(KeyChunks(args.forward, tilings.kv.count), group * length, tile, [&](int64_t chunk, Matrix<T> grad_q) {
    backward_chunk(args, tilings, statistics, tile, b, kv_head, chunk, grad_q);
  });
  for (int64_t g = 0; g < group; g++)
    for (int64_t i = 0; i < tilings.q.count; i++) {
      const TilePosition all{b, kv_head * group + g, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
      store_grad_queries(args, all, tile.grad_q.from(g * length + all.q0));
    }
}

// grad_q of one tile of queries, and its contribution to grad_mask.
template <class Tile, class T>
void backward_queries(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics,
                      Tile& tile, int64_t b, int64_t h, int64_t i) {
  const ForwardCall& forward = args.forward;
  const TilePosition all{b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
  load_queries(args, all, i, statistics, tile);
  const KeyChunks chunks(forward, tilings.kv.count);
  sum_chunks(chunks, all.rows, tile, [&](int64_t chunk, Matrix<T> grad_q) {
    TilePosition at;
    for (int64_t j = chunks.begin(chunk); j < chunks.end(chunk); j++) {
      if (!tilings.visit(forward, b, h, i, j, at) ||
          !find_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible))
        continue;
      load_keys(forward, at, tile);
      score_gradients(args, at, tile);
      add_grad_queries(forward, at, tile, grad_q.from(at.skipped));
    }
  });
  store_grad_queries(args, all, tile.grad_q);
}

// Tiles of queries that add to the same elements of grad_mask belong to one task, which processes them in order.
struct QueryTasks {
  int64_t b_tasks, h_tasks, i_tasks, b_each, h_each, i_each;
  LOWBIT_INLINE QueryTasks(const BackwardCall& args, int64_t tiles) {
    const ForwardCall& forward = args.forward;
    const auto shared = [&](int dim) { return args.grad_mask && args.grad_mask.stride[dim] == 0; };
    b_each = shared(0) ? forward.batch() : 1, h_each = shared(1) ? forward.heads() : 1,
    i_each = shared(2) ? larger(1, tiles) : 1;
    b_tasks = forward.batch() / b_each, h_tasks = forward.heads() / h_each, i_tasks = tiles / i_each;
  }
  template <class F>
  LOWBIT_INLINE void run(int64_t task, F&& f) const {
    const int64_t b0 = task / i_tasks / h_tasks * b_each, h0 = task / i_tasks % h_tasks * h_each,
                  i0 = task % i_tasks * i_each;
    for (int64_t b = b0; b < b0 + b_each; b++)
      for (int64_t h = h0; h < h0 + h_each; h++)
        for (int64_t i = i0; i < i0 + i_each; i++) f(b, h, i);
  }
};

// The sink has dp = 0: ds = -p D.
template <class T>
void add_grad_sink(const BackwardCall& args, const RowStatistics<T>& statistics) {
  const ForwardCall& forward = args.forward;
  const int64_t length = forward.q_length();
  for (int64_t h = 0; h < forward.heads(); h++) {
    double total = 0;
    for (int64_t b = 0; b < forward.batch(); b++)
      for (int64_t r = 0; r < length; r++) {
        const int64_t at = (b * forward.heads() + h) * length + r;
        const double lse = forward.lse.template as<const T>()[at];
        if (lse == kMinusInfinity<double>) continue;
        const double log_p = forward.sink.template as<const T>()[h] - lse - statistics.rest[at];
        total -= __builtin_exp(log_p) * statistics.delta[at];
      }
    args.grad_sink.template as<T>()[h] = static_cast<T>(total);
  }
}

template <class Tile, class F>
void run_backward_tasks(const ForwardCall& args, int64_t tasks, const Tiling& queries, int64_t grad_q_rows,
                        const ScorePlan ScoreProgram::* reverse, F&& f) {
  parallel_for(tasks, threads_for_attention(args), [&](int64_t task) {
    TileArena arena;
    Tile(args, queries, grad_q_rows, reverse, arena);
    const Scratch memory(arena.bytes);
    arena = {memory.arena()};
    Tile tile(args, queries, grad_q_rows, reverse, arena);
    f(task, tile);
  });
}

// The rest of the log-sum-exp of rows that have one: the log of the sum of their probabilities computed without it.
template <class Tile, class T>
void find_rests(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics) {
  const ForwardCall& forward = args.forward;
  const int64_t tasks = forward.batch() * forward.heads() * tilings.q.count;
  const auto reverse = &ScoreProgram::backward_only;
  run_backward_tasks<Tile>(forward, tasks, tilings.q, 0, reverse, [&](int64_t task, Tile& tile) {
    const int64_t head = task / tilings.q.count, i = task % tilings.q.count;
    const int64_t b = head / forward.heads(), h = head % forward.heads();
    const TilePosition all{b, h, tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
    const T* lse = forward.lse.template as<const T>() + head * forward.q_length() + all.q0;
    bool wanted = false;
    for (int64_t r = 0; r < all.rows; r++) wanted |= has_rest(lse[r]);
    if (!wanted) return;
    load_queries(args, all, i, statistics, tile);
    T totals[kBackwardQTile];
    const T* sink = forward.sink ? forward.sink.template as<const T>() + h : nullptr;
    for (int64_t r = 0; r < all.rows; r++) totals[r] = sink ? e_to_the_one(*sink - tile.lse[r]) : T{0};
    TilePosition at;
    for (int64_t j = 0; j < tilings.kv.count; j++) {
      if (!tilings.visit(forward, b, h, i, j, at)) continue;
      if (!find_visible(forward, RowBlock(at, 0, at.rows), tile.programs, tile.visible)) continue;
      load_keys(forward, at, tile);
      load_scores(forward, at, tile);
      tile.visible.for_each_row(at.rows, [&](int64_t r, Span span) {
        const T* s = tile.p.row(r);
        const auto row_lse = set1(tile.lse[at.skipped + r]);
        auto total = set1(T{0});
        for (int64_t c = span.begin; c < span.end; c += 16) total = add(total, e_to_the(sub(load(s + c), row_lse)));
        totals[at.skipped + r] += sum(total);
      });
    }
    for (int64_t r = 0; r < all.rows; r++)
      if (has_rest(lse[r])) statistics.rest[head * forward.q_length() + all.q0 + r] = log_sum(T{0}, totals[r]);
  });
}

// A pass over tiles of queries for the gradients of captured tensors, divided into the slices of their plan.
template <class Tile, class T>
void backward_captured(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics) {
  const ScoreGradientPlan& plan = *args.captured;
  run_backward_tasks<Tile>(args.forward, plan.slices(), tilings.q, tilings.q.tile, &ScoreProgram::backward,
                        [&](int64_t slice, Tile& tile) {
                          tile.captured = plan.targets(slice);
                          for (int64_t n = 0, items = plan.items(slice); n < items; n++) {
                            const ScoreGradientItem item = plan.item(slice, n);
                            backward_queries(args, tilings, statistics, tile, item.b, item.head, item.q);
                          }
                        });
}

// Kv heads divided into chunks of keys.
template <class Tile, class T>
void backward_chunks(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics,
                     Matrix<T> parts) {
  const ForwardCall& forward = args.forward;
  const int64_t chunks = KeyChunks(forward, tilings.kv.count).count,
                part = forward.group() * tilings.q.length;  // rows per chunk
  const int64_t kv_heads = forward.batch() * forward.kv_heads();
  run_backward_tasks<Tile>(forward, kv_heads * chunks, tilings.q, 0, &ScoreProgram::backward_only,
                        [&](int64_t task, Tile& tile) {
                          const int64_t head = task / chunks, order = task % chunks;
                          const int64_t chunk =
                              order % 2 ? chunks - 1 - order / 2
                                        : order / 2;  // pairs first and last: causality skews the work
                          const Matrix<T> grad_q = parts.from((head * chunks + chunk) * part);
                          clear_rows(grad_q, part);
                          backward_chunk(args, tilings, statistics, tile, head / forward.kv_heads(),
                                         head % forward.kv_heads(), chunk, grad_q);
                        });
  parallel_for(forward.batch() * forward.heads() * tilings.q.count, threads_for_attention(forward), [&](int64_t task) {
    const int64_t head = task / tilings.q.count, i = task % tilings.q.count;
    const TilePosition all{
        head / forward.heads(), head % forward.heads(), tilings.q.begin(i), 0, tilings.q.size(i), 0, 0, false};
    const Matrix<T> grad_q =
        parts.from(head / forward.group() * chunks * part + head % forward.group() * tilings.q.length + all.q0);
    for (int64_t chunk = 1; chunk < chunks; chunk++) add_rows(grad_q.from(chunk * part), grad_q, all.rows);
    store_grad_queries(args, all, grad_q);
  });
}

// One pass for grad_k and grad_v, and one for grad_q and the gradients of masks and captured tensors.
template <class Tile, class T>
void backward_passes(const BackwardCall& args, const Tilings& tilings, const RowStatistics<T>& statistics) {
  const ForwardCall& forward = args.forward;
  const int64_t key_tasks = forward.batch() * forward.kv_heads() * tilings.kv.count;
  run_backward_tasks<Tile>(forward, key_tasks, tilings.q, 0, &ScoreProgram::backward_only,
                        [&](int64_t task, Tile& tile) {
                          const int64_t head = task / tilings.kv.count, j = task % tilings.kv.count;
                          backward_keys(args, tilings, statistics, tile, head / forward.kv_heads(),
                                        head % forward.kv_heads(), j, Matrix<T>());
                        });
  if (args.captured) backward_captured<Tile>(args, tilings, statistics);
  if (args.captured && !args.grad_mask) return;
  const QueryTasks tasks(args, tilings.q.count);
  const int64_t count = tasks.b_tasks * tasks.h_tasks * tasks.i_tasks;
  run_backward_tasks<Tile>(forward, count, tilings.q, tilings.q.tile, &ScoreProgram::backward_only,
                        [&](int64_t task, Tile& tile) {
                          tile.adds_grad_mask = static_cast<bool>(args.grad_mask);
                          tasks.run(task, [&](int64_t b, int64_t h, int64_t i) {
                            backward_queries(args, tilings, statistics, tile, b, h, i);
                          });
                        });
}

template <class Tile>
void attention_backward(const BackwardCall& args) {
  using T = typename Tile::Real;
  const ForwardCall& forward = args.forward;
  const int threads = threads_for_attention(forward);
  const Tilings tilings(forward, kBackwardQTile, kBackwardKvTile);
  const int64_t heads = forward.batch() * forward.heads(), kv_heads = forward.batch() * forward.kv_heads(),
                length = forward.q_length();
  const int64_t chunks = KeyChunks(forward, tilings.kv.count).count;
  // Whether that many tasks keep the threads busy enough: five products, where the two passes need seven.
  const auto enough = [&](int64_t tasks) { return tasks * 7 >= ceil_div(tasks, threads) * threads * 5; };
  const bool in_one_pass = !args.grad_mask && !args.captured, by_head = in_one_pass && enough(kv_heads);
  const bool by_chunk = in_one_pass && !by_head && chunks > 1 && enough(kv_heads * chunks);

  const int64_t stride = row_stride(forward.q.size(3));
  const int64_t all_rows = heads * length, part_scores = by_chunk ? heads * chunks * length * stride : 0;
  Arena counted;
  counted.array<T>(all_rows), counted.array<T>(all_rows), counted.array<T>(part_scores);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  const RowStatistics<T> statistics{arena.array<T>(all_rows), arena.array<T>(all_rows)};
  bool some_rest = false;
  parallel_for(heads, threads, [&](int64_t head) {
    if (row_deltas(args, head, statistics.from(head * length))) __atomic_store_n(&some_rest, true, __ATOMIC_RELAXED);
  });
  if (some_rest) find_rests<Tile>(args, tilings, statistics);
  if (args.grad_sink) add_grad_sink(args, statistics);
  const Matrix<T> parts{arena.array<T>(part_scores), stride};
  if (by_chunk) return backward_chunks<Tile>(args, tilings, statistics, parts);
  if (!by_head) return backward_passes<Tile>(args, tilings, statistics);
  const int64_t rows = forward.group() * length;
  run_backward_tasks<Tile>(
      forward, kv_heads, tilings.q, rows, &ScoreProgram::backward_only, [&](int64_t task, Tile& tile) {
        backward_head(args, tilings, statistics, tile, task / forward.kv_heads(), task % forward.kv_heads());
      });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
