// SPDX-License-Identifier: Apache-2.0
// One call: every (batch, kv head, split of 256 keys) is a task that leaves largest score, sum and weighted values of its rows; then the splits of
// each row are added in order. The cut depends on the lengths alone, so results are the same for any number of threads and in any batch.
#pragma once

#include "core/scratch.hpp"
#include "cpu/decode/codes.hpp"
#include "cpu/decode/floats.hpp"
#include "cpu/score_program/vm.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTaskRows = 64;               // queries times heads of a group that meet a split together
constexpr int64_t kPartialBytes = 16ll << 20;  // of the partial results of one pass over some of the heads

struct DecodePlan {
  int64_t first_split, splits;  // that some query can see
  int64_t l_count, l_blocks;    // queries of a task
  int64_t task_rows;            // their rows, rounded up to kRowTile
  int64_t padded_e, padded_ev;
  bool heads_first;             // heads are next to each other in memory, tokens are not

  explicit DecodePlan(const DecodeArgs& args) {
    const int64_t length = args.q_length(), kv_length = args.kv_length();
    const int64_t end = args.causal ? smaller(kv_length, larger(0, args.position + length)) : kv_length;
    const int64_t begin = args.window > 0 ? smaller(end, larger(0, args.position - args.window + 1)) : 0;
    first_split = begin / kSplit, splits = ceil_div(end, kSplit) - first_split;
    if (end <= begin) splits = 0;
    l_count = larger(1, smaller(length, kTaskRows / args.group())), l_blocks = ceil_div(length, l_count);
    task_rows = round_up(l_count * args.group(), kRowTile);
    padded_e = kv_padded(args.q.size(3)), padded_ev = kv_padded(args.out.size(3));
    heads_first = args.k.stride[1] < args.k.stride[2];
  }
  LOWBIT_INLINE int64_t rows_per_kv_head(const DecodeArgs& args) const { return args.group() * args.q_length(); }
};

// Keys begin..end of the split that the query at `position` sees.
struct VisibleKeys {
  int64_t begin, end;
  LOWBIT_INLINE VisibleKeys(const DecodeArgs& args, const SplitPlace& at, int64_t l) {
    const int64_t position = args.position + l - at.first;
    end = args.causal ? smaller(at.count, larger(0, position + 1)) : at.count;
    begin = args.window > 0 ? smaller(end, larger(0, position - args.window + 1)) : 0;
  }
};

// ---- queries -----------------------------------------------------------------------------------------------------------------------

LOWBIT_INLINE void rotate_row(float* row, int64_t columns) {  // by the Hadamard matrix of kv_rotation(columns), over sqrt of its size
  const int64_t size = kv_rotation(columns);
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(size));
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t block = 0; block < kv_padded(columns); block += 2 * half)
      for (int64_t i = block; i < block + half; i++) {
        const float a = row[i], b = row[i + half];
        row[i] = a + b, row[i + half] = a - b;
      }
  for (int64_t i = 0; i < kv_padded(columns); i++) row[i] *= norm;
}

template <class Kv>
struct PreparedQueries {
  float* floats;   // [B * Hq * L][padded_e]
  int16_t* codes;  // the same
  float* steps;    // [B * Hq * L]

  PreparedQueries(const DecodeArgs& args, const DecodePlan& plan, Arena& arena) {
    const int64_t rows = args.batch() * args.heads() * args.q_length();
    floats = arena.array<float>(rows * plan.padded_e), codes = arena.array<int16_t>(Kv::kCodes ? rows * plan.padded_e : 0);
    steps = arena.array<float>(Kv::kCodes ? rows : 0);
  }
  void fill(const DecodeArgs& args, const DecodePlan& plan) const {
    const int64_t columns = args.q.size(3), length = args.q_length();
    const float scale = static_cast<float>(args.scale);
    for (int64_t head = 0; head < args.batch() * args.heads(); head++) {
      const HeadView view(args.q, head / args.heads(), head % args.heads());
      const Matrix<float> to{floats + head * length * plan.padded_e, plan.padded_e};
      for (int64_t i = 0; i < length * plan.padded_e; i++) to.data[i] = 0.0f;
      widen_rows(view, 0, length, columns, Kv::kCodes ? 1.0f : scale, to);
      if constexpr (Kv::kCodes)
        for (int64_t l = 0; l < length; l++) {
          if (args.rotated) rotate_row(to.row(l), columns);
          const int64_t row = head * length + l;
          steps[row] = to_int16(to.row(l), plan.padded_e, codes + row * plan.padded_e) * scale;
        }
    }
  }
  // Rows past the last of a task are its last again.
  LOWBIT_INLINE void point(const DecodeArgs& args, const DecodePlan& plan, const SplitPlace& at, QueryRows q) const {
    const int64_t rows = args.group() * at.l_count;
    for (int64_t r = 0; r < plan.task_rows; r++) {
      const int64_t i = smaller(r, rows - 1), head = at.b * args.heads() + at.kv_head * args.group() + i / at.l_count;
      const int64_t row = head * args.q_length() + at.l0 + i % at.l_count;
      q.floats[r] = floats + row * plan.padded_e;
      if constexpr (Kv::kCodes) q.codes[r] = codes + row * plan.padded_e, q.steps[r] = steps + row;
    }
  }
};

// ---- one split ---------------------------------------------------------------------------------------------------------------------

// What a split leaves of a row, for every row of a pass: [row][split].
struct Partials {
  float *max, *sum, *out;  // out [row][split][padded_ev]
  Partials(int64_t rows, const DecodePlan& plan, Arena& arena) {
    max = arena.array<float>(rows * plan.splits), sum = arena.array<float>(rows * plan.splits);
    out = arena.array<float>(rows * plan.splits * plan.padded_ev);
  }
};

struct TaskMemory : SplitMemory {
  TaskMemory(const DecodeArgs& args, const DecodePlan& plan, Arena& arena) {
    const int64_t rows = plan.task_rows, groups = larger(1, larger(plan.padded_e, plan.padded_ev) / kKvGroup);
    scores = arena.matrix<float>(rows, kSplit), out = arena.matrix<float>(rows, plan.padded_ev);
    sums = {arena.array<float>(rows), arena.array<float>(rows), arena.array<float>(rows)};
    q = {arena.array<const float*>(rows), arena.array<const int16_t*>(rows), arena.array<const float*>(rows)};
    const bool codes = args.format() != KvFormat::floating;
    scales = arena.array<float>(codes ? groups * kSplit : 0), weights = arena.array<int16_t>(codes ? groups * rows * kSplit : 0);
    steps = arena.array<float>(groups * rows), weighted = arena.array<float>(kSplit);
    group_scales = arena.array<float>(kSplit);
    program = arena.array<char>(larger(program_bytes(args.score_mod, plan), program_bytes(args.mask_mod, plan)));
  }
  static int64_t program_bytes(const ScoreCall* call, const DecodePlan& plan) {
    return call ? static_cast<int64_t>(ScoreVm<float>::bytes(call->program().forward, static_cast<int>(plan.l_count), kSplit)) : 0;
  }
};

LOWBIT_INLINE void run_program(const ScoreCall* call, const DecodeArgs& args, const SplitPlace& at, SplitMemory& memory) {
  if (!call) return;
  ScoreVm<float> vm(*call, call->program().forward, static_cast<int>(at.l_count), kSplit, memory.program);
  for (int64_t g = 0; g < args.group(); g++)
    vm.run({.b = at.b, .h = at.kv_head * args.group() + g, .q0 = args.position + at.l0, .k0 = at.first, .rows = static_cast<int>(at.l_count),
            .cols = static_cast<int>(at.count), .scores = memory.scores.row(g * at.l_count), .stride = memory.scores.stride});
}

// Everything between the two products.
LOWBIT_INLINE void probabilities(const DecodeArgs& args, const SplitPlace& at, SplitMemory& memory) {
  const int64_t rows = args.group() * at.l_count, padded = round_up(at.count, 16);
  run_program(args.score_mod, args, at, memory);
  run_program(args.mask_mod, args, at, memory);
  if (args.mask)
    for (int64_t g = 0; g < args.group(); g++)
      add_mask(args.mask, TilePlace{.b = at.b, .h = at.kv_head * args.group() + g, .q0 = at.l0, .k0 = at.first, .rows = static_cast<int>(at.l_count),
                                    .cols = static_cast<int>(at.count), .skipped = 0, .partial = false},
               Matrix<float>{memory.scores.row(g * at.l_count), memory.scores.stride});
  for (int64_t r = 0; r < rows; r++) {
    const VisibleKeys visible(args, at, at.l0 + r % at.l_count);
    float* row = memory.scores.row(r);
    for (int64_t t = 0; t < visible.begin; t++) row[t] = kMinusInfinity<float>;
    for (int64_t t = visible.end; t < padded; t++) row[t] = kMinusInfinity<float>;
    memory.sums.max[r] = kMinusInfinity<float>, memory.sums.sum[r] = 0.0f;
  }
  softmax_rows(memory.scores, rows, padded, memory.sums);
}

template <class Kv>
void decode_split(const DecodeArgs& args, const DecodePlan& plan, const PreparedQueries<Kv>& queries, const SplitPlace& at, SplitMemory& memory) {
  const int64_t rows = args.group() * at.l_count;
  queries.point(args, plan, at, memory.q);
  const TokenRows keys(args.k, at.b, at.kv_head, at.first, at.count), values(args.v, at.b, at.kv_head, at.first, at.count);
  Kv::scores(args, keys, memory.q, rows, memory.scores, memory, at);
  probabilities(args, at, memory);
  for (int64_t r = 0; r < round_up(rows, kRowTile); r++)
    for (int64_t c = 0; c < plan.padded_ev; c += 16) store(memory.out.row(r) + c, set1(0.0f));
  Kv::values(args, values, rows, memory.scores, memory.out, memory, at);
}

// ---- one call ----------------------------------------------------------------------------------------------------------------------

// out = sum over splits of exp(max - top) * out / sum over splits of exp(max - top) * sum, in the order of the splits.
LOWBIT_INLINE void combine_row(const DecodeArgs& args, const DecodePlan& plan, const Partials& partials, int64_t partial_row, int64_t row) {
  const int64_t length = args.q_length(), head = row / length, b = head / args.heads(), h = head % args.heads(), l = row % length;
  const float *max = partials.max + partial_row * plan.splits, *sum = partials.sum + partial_row * plan.splits;
  const float* out = partials.out + partial_row * plan.splits * plan.padded_ev;
  const float sink = args.sink ? args.sink.as<const float>()[h] : kMinusInfinity<float>, log2e = static_cast<float>(kLog2e);
  float top = sink;
  for (int64_t s = 0; s < plan.splits; s++) top = max[s] > top || max[s] != max[s] ? max[s] : top;
  const float base = top == kMinusInfinity<float> ? 0.0f : top * log2e;
  float total = sink == kMinusInfinity<float> ? 0.0f : exp2_one(sink * log2e - base);
  Arena arena{static_cast<char*>(scratch(Scratch::tile, (plan.splits + plan.padded_ev + 32) * sizeof(float)))};
  float *weight = arena.array<float>(plan.splits), *result = arena.array<float>(plan.padded_ev);
  for (int64_t s = 0; s < plan.splits; s++) {
    weight[s] = max[s] == kMinusInfinity<float> ? 0.0f : exp2_one(max[s] * log2e - base);
    total += weight[s] * sum[s];
  }
  for (int64_t c = 0; c < args.out.size(3); c += 16) {
    f32x16 acc = set1(0.0f);
    for (int64_t s = 0; s < plan.splits; s++)
      if (weight[s] != 0.0f) acc = fma(load(out + s * plan.padded_ev + c), set1(weight[s]), acc);
    store(result + c, acc);
  }
  const float inverse = total == 0.0f ? 0.0f : 1.0f / total;
  narrow_rows(Matrix<float>{result, plan.padded_ev}, &inverse, 1, args.out.size(3), HeadView(args.out, b, h), l);
  if (args.lse) args.lse.as<float>()[row] = total == 0.0f ? kMinusInfinity<float> : (base + log2(total)) / log2e;
}

// Splits of a head that follow each other go to one thread, up to eight, so that what is prefetched behind a split is not for nothing.
LOWBIT_INLINE int64_t splits_per_task(int64_t splits, int threads) { return larger(1, smaller(8, splits / (8 * threads))); }

template <class Kv>
void decode_pass(const DecodeArgs& args, const DecodePlan& plan, const PreparedQueries<Kv>& queries, const Partials& partials, int64_t first_pair,
                 int64_t pairs, int threads) {
  const int64_t rows = plan.rows_per_kv_head(args), kv_heads = args.kv_heads(), heads = pairs * plan.l_blocks;
  const int64_t run = splits_per_task(heads * plan.splits, threads), runs = ceil_div(plan.splits, run);
  parallel_for(heads * runs, threads, [&](int64_t task) {
    const int64_t head = plan.heads_first ? task % heads : task / runs, first_split = (plan.heads_first ? task / heads : task % runs) * run;
    const int64_t pair = head / plan.l_blocks, l0 = head % plan.l_blocks * plan.l_count, l_count = smaller(plan.l_count, args.q_length() - l0);
    Arena counted;
    TaskMemory{args, plan, counted};
    Arena arena{static_cast<char*>(scratch(Scratch::tile, counted.bytes))};
    TaskMemory memory(args, plan, arena);
    for (int64_t split = first_split; split < smaller(plan.splits, first_split + run); split++) {
      const int64_t first = (plan.first_split + split) * kSplit;
      const SplitPlace at{.b = (first_pair + pair) / kv_heads, .kv_head = (first_pair + pair) % kv_heads, .l0 = l0, .l_count = l_count, .first = first,
                          .count = smaller(kSplit, args.kv_length() - first)};
      decode_split<Kv>(args, plan, queries, at, memory);
      for (int64_t r = 0; r < args.group() * l_count; r++) {
        const int64_t row = pair * rows + r / l_count * args.q_length() + l0 + r % l_count, slot = row * plan.splits + split;
        partials.max[slot] = memory.sums.max[r], partials.sum[slot] = memory.sums.sum[r];
        for (int64_t c = 0; c < plan.padded_ev; c += 16) store(partials.out + slot * plan.padded_ev + c, load(memory.out.row(r) + c));
      }
    }
  });
  parallel_for(pairs * rows, threads, [&](int64_t row) { combine_row(args, plan, partials, row, first_pair * rows + row); });
}

template <class Kv>
void decode_call(const DecodeArgs& args) {
  const DecodePlan plan(args);
  const int64_t pairs = args.batch() * args.kv_heads(), rows = plan.rows_per_kv_head(args);
  const int64_t pair_bytes = rows * larger(1, plan.splits) * (plan.padded_ev + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t pass = smaller(pairs, larger(1, kPartialBytes / pair_bytes));
  Arena counted;
  PreparedQueries<Kv>{args, plan, counted};
  Partials{pass * rows, plan, counted};
  Arena arena{static_cast<char*>(scratch(Scratch::activations, counted.bytes))};
  const PreparedQueries<Kv> queries(args, plan, arena);
  const Partials partials(pass * rows, plan, arena);
  queries.fill(args, plan);
  const int threads = pairs * rows * plan.splits * kSplit * plan.padded_e < kSerialProducts ? 1 : num_threads();
  for (int64_t first = 0; first < pairs; first += pass)
    decode_pass<Kv>(args, plan, queries, partials, first, smaller(pass, pairs - first), threads);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
