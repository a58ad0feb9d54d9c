// SPDX-License-Identifier: Apache-2.0
// One call: every (batch, kv head, split of 256 keys) is a task that computes the largest score, the sum and the
// weighted values of its rows; then the splits of each row are combined in order. The division depends on the lengths
// alone, so results are the same for any number of threads and in any batch.
#pragma once

#include "cpu/attention/in_memory.hpp"
#include "cpu/decode/codes.hpp"
#include "cpu/decode/floats.hpp"
#include "cpu/score_program/vm.hpp"
#include "core/parallel.hpp"
#include "core/scratch.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTaskRows = 64;               // max queries times heads per task
constexpr int64_t kTasksPerThread = 4;          // min tasks per thread, before adjacent heads are separated
constexpr int64_t kPartialBytes = 16ll << 20;   // partial results of one pass over some of the heads

struct DecodePlan {
  int64_t first_split, splits;  // splits that some query can see
  int64_t l_count, l_blocks;    // queries of a task, blocks of queries
  int64_t task_rows;            // rows of a task, rounded up to kRowTile
  int64_t padded_e, padded_ev;
  int64_t heads;  // kv heads per task; above 1 if heads are adjacent in memory and tokens are not

  DecodePlan(const DecodeArgs& args, int threads) {
    const int64_t length = args.q_length(), kv_length = args.kv_length();
    const int64_t end = args.causal ? smaller(kv_length, larger(0, args.position + length)) : kv_length;
    const int64_t begin = args.window > 0 ? smaller(end, larger(0, args.position - args.window + 1)) : 0;
    first_split = begin / kSplit, splits = ceil_div(end, kSplit) - first_split;
    if (end <= begin) splits = 0;
    l_count = larger(1, smaller(length, kTaskRows / args.group())), l_blocks = ceil_div(length, l_count);
    task_rows = round_up(l_count * args.group(), kRowTile);
    padded_e = kv_padded(args.q.size(3)), padded_ev = kv_padded(args.out.size(3));
    heads = 1;
    if (interleaved(args.k) && interleaved(args.v)) heads = larger(1, smaller(args.kv_heads(), kTaskRows / task_rows));
    while (heads > 1 && args.batch() * bundles_per_batch(args) * l_blocks * splits < kTasksPerThread * threads)
      heads = ceil_div(heads, 2);
  }
  int64_t bundles_per_batch(const DecodeArgs& args) const {
    return ceil_div(args.kv_heads(), heads);
  }  // bundle: the kv heads of a task
  SplitRange range_of(const DecodeArgs& args, int64_t bundle, int64_t l_block) const {
    const int64_t kv_head = bundle % bundles_per_batch(args) * heads, l0 = l_block * l_count;
    return {.b = bundle / bundles_per_batch(args),
            .kv_head = kv_head,
            .heads = smaller(heads, args.kv_heads() - kv_head),
            .l0 = l0,
            .l_count = smaller(l_count, args.q_length() - l0),
            .first = 0,
            .count = 0};
  }
  static bool interleaved(const TensorView& x) { return x.stride[1] == x.size(3) && x.stride[1] < x.stride[2]; }
  LOWBIT_INLINE int64_t rows_per_kv_head(const DecodeArgs& args) const { return args.group() * args.q_length(); }
};

// The keys begin..end of the split that the query at `position` sees.
struct VisibleKeys {
  int64_t begin, end;
  LOWBIT_INLINE VisibleKeys(const DecodeArgs& args, const SplitRange& at, int64_t l) {
    const int64_t position = args.position + l - at.first;
    end = args.causal ? smaller(at.count, larger(0, position + 1)) : at.count;
    begin = args.window > 0 ? smaller(end, larger(0, position - args.window + 1)) : 0;
  }
};

// ---- queries -------------------------------------------------------------------------------------------------------

// Queries as float32 times the scale, or int16 codes with a step (times the scale), rotated if the keys are. For each
// task its rows (the last one repeated up to a multiple of kRowTile); two rows share a vector, half each: [columns of
// half a vector][pair][half].
template <class Kv>
struct PreparedQueries {
  float* floats;   // [B][Hkv][l_blocks][task_rows][padded_e]; for codes: scratch for one row
  int16_t* codes;  // the same
  float* steps;    // [B][Hkv][l_blocks][task_rows][2]: see QueryRows
  int16_t* row_codes;  // scratch for one row

  PreparedQueries(const DecodeArgs& args, const DecodePlan& plan, TileArena& arena) {
    const int64_t rows = args.batch() * args.kv_heads() * plan.l_blocks * plan.task_rows;
    floats = arena.array<float>((Kv::kCodes ? 0 : rows * plan.padded_e) + plan.padded_e),
    codes = arena.array<int16_t>(Kv::kCodes ? rows * plan.padded_e : 0);
    steps = arena.array<float>(Kv::kCodes ? 2 * rows : 0), row_codes = arena.array<int16_t>(plan.padded_e);
  }
  void fill(const DecodeArgs& args, const DecodePlan& plan) const {
    const int64_t tasks = args.batch() * args.kv_heads() * plan.l_blocks;
    float* row = floats + (Kv::kCodes ? 0 : tasks * plan.task_rows * plan.padded_e);
    for (int64_t task = 0; task < tasks; task++) {
      const int64_t pair = task / plan.l_blocks, l0 = task % plan.l_blocks * plan.l_count,
                    l_count = smaller(plan.l_count, args.q_length() - l0);
      const int64_t rows = args.group() * l_count;
      for_row_tiles(rows, [&](auto kRows, int64_t first) {
        for (int64_t i = 0; i < paired(kRows); i++) {
          const int64_t r = smaller(first + i, rows - 1), at = task * plan.task_rows + first + i;
          const int64_t b = pair / args.kv_heads(), h = pair % args.kv_heads() * args.group() + r / l_count;
          load_row(args, b, h, l0 + r % l_count, row);
          constexpr int64_t kPairs = paired(kRows) / 2, kTokens = 8 / paired(kRows);
          if constexpr (Kv::kCodes) {
            const float step = encode_row(args, row);
            for (int64_t j = 0; j < kTokens; j++) steps[(at - i) * 2 + i * kTokens + j] = step;
            pair_up<16, kPairs>(row_codes, i, plan.padded_e, codes + (at - i) * plan.padded_e);
          } else {
            pair_up<8, kPairs>(row, i, plan.padded_e, floats + (at - i) * plan.padded_e);
          }
        }
      });
    }
  }
  LOWBIT_INLINE QueryRows of(const DecodeArgs& args, const DecodePlan& plan, const SplitRange& at) const {
    const int64_t row = ((at.b * args.kv_heads() + at.kv_head) * plan.l_blocks + at.l0 / plan.l_count) * plan.task_rows;
    return {floats + row * plan.padded_e, codes + row * plan.padded_e, steps + 2 * row, plan.padded_e,
            plan.l_blocks * plan.task_rows};
  }

 private:
  void load_row(const DecodeArgs& args, int64_t b, int64_t h, int64_t l, float* row) const {
    const int64_t columns = args.q.size(3), padded = kv_padded(columns);
    for (int64_t c = 0; c < padded; c += 16) store(row + c, set1(0.0f));
    widen_rows(HeadView(args.q, b, h), l, 1, columns, Kv::kCodes ? 1.0f : static_cast<float>(args.scale),
               Matrix<float>{row, padded});
  }
  // Encodes into row_codes; returns the step, times the scale.
  LOWBIT_INLINE float encode_row(const DecodeArgs& args, float* row) const {
    const int64_t padded = kv_padded(args.q.size(3));
    if (args.rotated) rotate_row(row, args.q.size(3));
    i32x16 top = set1(int32_t{0});
    for (int64_t c = 0; c < padded; c += 16) top = larger_magnitude(top, load(row + c));
    const float step = int16_step(top);
    to_int16(row, padded, step, row_codes);
    return step * static_cast<float>(args.scale);
  }
  // Copies row i of a tile to its position: rows 0..kPairs - 1 are first halves. In every column order, four elements
  // stay together.
  template <int kHalf, int64_t kPairs, class T>
  LOWBIT_INLINE static void pair_up(const T* row, int64_t i, int64_t columns, T* tile) {
    for (int64_t c = 0; c < columns; c += 4) {
      T* to = tile + ((c / kHalf * kPairs + i % kPairs) * 2 + i / kPairs) * kHalf + c % kHalf;
      __builtin_memcpy(to, row + c / 16 * 16 + column_of<typename Kv::Element>(c % 16), 4 * sizeof(T));
    }
  }
};

// ---- one split -----------------------------------------------------------------------------------------------------

// The results of splits, for each row of a pass: [row][split].
struct Partials {
  float *max, *sum, *out;  // out [row][split][padded_ev]
  Partials(int64_t rows, const DecodePlan& plan, TileArena& arena) {
    max = arena.array<float>(rows * plan.splits), sum = arena.array<float>(rows * plan.splits);
    out = arena.array<float>(rows * plan.splits * plan.padded_ev);
  }
};

struct TaskMemory : SplitMemory {
  TaskMemory(const DecodeArgs& args, const DecodePlan& plan, TileArena& arena) {
    head_rows = plan.task_rows;
    const int64_t rows = plan.heads * head_rows, groups = larger(1, larger(args.k_scale ? args.k_scale.size(3) : 0,
                                                                           args.v_scale ? args.v_scale.size(3) : 0));
    scores = arena.matrix<float>(rows, kSplit), out = arena.matrix<float>(rows, plan.padded_ev);
    softmax = {
        arena.array<float>(rows), arena.array<float>(rows), arena.array<float>(16 * rows), out, plan.padded_ev, false};
    const bool codes = args.format() != KvFormat::floating;
    scales = arena.array<float>(codes ? plan.heads * groups * kSplit + 16 : 0),
    weights = arena.array<int16_t>(codes ? groups * rows * kSplit : 0);
    steps = arena.array<float>(codes ? groups * rows : 0), weighted = arena.array<float>(codes ? kRowTile * kSplit : 0);
    gathered = arena.array<float>(codes ? groups * kSplit : 0);
    program = arena.array<char>(larger(program_bytes(args.score_mod, plan), program_bytes(args.mask_mod, plan)));
  }
  static int64_t program_bytes(const ScoreCall* call, const DecodePlan& plan) {
    return call ? static_cast<int64_t>(
                      ScoreVm<float>::bytes(call->program().forward, static_cast<int>(plan.l_count), kSplit))
                : 0;
  }
};

LOWBIT_INLINE void run_program(const ScoreCall* call, const DecodeArgs& args, const SplitRange& at,
                               Matrix<float> scores, void* memory) {
  if (!call) return;
  ScoreVm<float> vm(*call, call->program().forward, static_cast<int>(at.l_count), kSplit, memory);
  for (int64_t g = 0; g < args.group(); g++)
    vm.run({.b = at.b,
            .h = at.kv_head * args.group() + g,
            .q0 = args.position + at.l0,
            .k0 = at.first,
            .rows = static_cast<int>(at.l_count),
            .cols = static_cast<int>(at.count),
            .scores = scores.row(g * at.l_count),
            .stride = scores.stride});
}

// Everything between the two products, for one kv head.
LOWBIT_INLINE void probabilities(const DecodeArgs& args, const SplitRange& at, Matrix<float> scores,
                                 const RunningSoftmax<float>& softmax, void* program) {
  const int64_t rows = args.group() * at.l_count, padded = round_up(at.count, 16);
  run_program(args.score_mod, args, at, scores, program);
  run_program(args.mask_mod, args, at, scores, program);
  if (args.mask)
    for (int64_t g = 0; g < args.group(); g++)
      add_mask(args.mask,
               TilePosition{.b = at.b,
                         .h = at.kv_head * args.group() + g,
                         .q0 = at.l0,
                         .k0 = at.first,
                         .rows = static_cast<int>(at.l_count),
                         .cols = static_cast<int>(at.count),
                         .skipped = 0,
                         .partial = false},
               Matrix<float>{scores.row(g * at.l_count), scores.stride});
  for (int64_t r = 0; r < rows; r++) {
    const VisibleKeys visible(args, at, at.l0 + r % at.l_count);
    float* row = scores.row(r);
    for (int64_t t = 0; t < visible.begin; t++) row[t] = kMinusInfinity<float>;
    for (int64_t t = visible.end; t < padded; t++) row[t] = kMinusInfinity<float>;
    softmax_row(softmax, r, row, {0, static_cast<int>(padded)});
  }
}

// The part of a split that the mask shows to some row, cut at multiples of 16: the rest of a static cache is not read.
LOWBIT_INLINE SplitRange shown_part(const DecodeArgs& args, SplitRange at) {
  if (!args.mask) return at;
  const TilePosition tile{.b = at.b,
                       .h = at.kv_head * args.group(),
                       .q0 = at.l0,
                       .k0 = at.first,
                       .rows = static_cast<int>(at.l_count),
                       .cols = static_cast<int>(at.count),
                       .skipped = 0,
                       .partial = false};
  const Span all{0, round_up(at.count, 16)};
  const Span shown = shown_columns(args.mask, tile, at.heads * args.group(), all);
  at.first += shown.begin, at.count = larger(0, smaller(at.count, shown.end) - shown.begin);
  return at;
}

template <class Kv>
void decode_split(const DecodeArgs& args, const DecodePlan& plan, const PreparedQueries<Kv>& queries,
                  const SplitRange& split, SplitMemory& memory) {
  const SplitRange at = shown_part(args, split);
  if (at.count == 0) return start_softmax(memory.softmax, at.heads * memory.head_rows);
  const int64_t rows = args.group() * at.l_count;
  Kv::scores(args, TokenRows(args.k, at), queries.of(args, plan, at), rows, memory, at);
  start_softmax(memory.softmax, at.heads * memory.head_rows);
  for (int64_t h = 0; h < at.heads; h++) {
    const int64_t first = h * memory.head_rows;
    SplitRange range = at;
    range.kv_head += h, range.heads = 1;
    probabilities(args, range, {memory.scores.row(first), memory.scores.stride}, memory.softmax.from(first),
                  memory.program);
  }
  Kv::values(args, TokenRows(args.v, at), rows, memory, at);
}

// ---- one call ------------------------------------------------------------------------------------------------------

// out = sum over splits of exp(max - top) * out / sum over splits of exp(max - top) * sum, in split order.
LOWBIT_INLINE void combine_row(const DecodeArgs& args, const DecodePlan& plan, const Partials& partials,
                               int64_t partial_row, int64_t row) {
  const int64_t length = args.q_length(), head = row / length, b = head / args.heads(), h = head % args.heads(),
                l = row % length;
  const float *max = partials.max + partial_row * plan.splits, *sum = partials.sum + partial_row * plan.splits;
  const float* out = partials.out + partial_row * plan.splits * plan.padded_ev;
  const float sink = args.sink ? args.sink.as<const float>()[h] : kMinusInfinity<float>;
  float top = sink;
  for (int64_t s = 0; s < plan.splits; s++) top = max[s] > top || max[s] != max[s] ? max[s] : top;
  const float base = top == kMinusInfinity<float> ? 0.0f : top;
  float total = sink == kMinusInfinity<float> ? 0.0f : e_to_the_one(sink - base);
  const Scratch memory((plan.splits + plan.padded_ev + 32) * static_cast<int64_t>(sizeof(float)) + 2 * kRedZone);
  Arena arena = memory.arena();
  float *weight = arena.array<float>(plan.splits), *result = arena.array<float>(plan.padded_ev);
  for (int64_t s = 0; s < plan.splits; s++) {
    weight[s] = max[s] == kMinusInfinity<float> ? 0.0f : e_to_the_one(max[s] - base);
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
  if (args.lse) args.lse.as<float>()[row] = total == 0.0f ? kMinusInfinity<float> : log_sum(base, total);
}

// Up to eight consecutive splits go to one thread, so that the lines prefetched past a split are used.
LOWBIT_INLINE int64_t splits_per_task(int64_t splits, int threads) {
  return larger(1, smaller(8, splits / (8 * threads)));
}

template <class Kv>
void decode_pass(const DecodeArgs& args, const DecodePlan& plan, const PreparedQueries<Kv>& queries,
                 const Partials& partials, int64_t first_bundle, int64_t bundles, int threads) {
  const int64_t rows = plan.rows_per_kv_head(args), blocks = bundles * plan.l_blocks;
  const int64_t run = splits_per_task(blocks * plan.splits, threads), runs = ceil_div(plan.splits, run);
  parallel_for(blocks * runs, threads, [&](int64_t task) {
    const int64_t block = task / runs, first_split = task % runs * run, bundle = block / plan.l_blocks;
    SplitRange at = plan.range_of(args, first_bundle + bundle, block % plan.l_blocks);
    TileArena counted;
    TaskMemory{args, plan, counted};
    const Scratch taken(counted.bytes);
    TileArena arena{taken.arena()};
    TaskMemory memory(args, plan, arena);
    for (int64_t split = first_split; split < smaller(plan.splits, first_split + run); split++) {
      at.first = (plan.first_split + split) * kSplit, at.count = smaller(kSplit, args.kv_length() - at.first);
      decode_split<Kv>(args, plan, queries, at, memory);
      for (int64_t h = 0; h < at.heads; h++)
        for (int64_t r = 0; r < args.group() * at.l_count; r++) {
          const int64_t row = (bundle * plan.heads + h) * rows + r / at.l_count * args.q_length() + at.l0 +
                              r % at.l_count,
                        slot = row * plan.splits + split;
          const int64_t from = h * plan.task_rows + r;
          partials.max[slot] = memory.softmax.base[from],
          partials.sum[slot] = sum(load(memory.softmax.sums + 16 * from));
          for (int64_t c = 0; c < plan.padded_ev; c += 16)
            store(partials.out + slot * plan.padded_ev + c, load(memory.out.row(from) + c));
        }
    }
  });
  parallel_for(bundles * plan.heads * rows, threads, [&](int64_t partial) {
    const SplitRange at = plan.range_of(args, first_bundle + partial / (plan.heads * rows), 0);
    const int64_t h = partial / rows % plan.heads;
    if (h < at.heads)
      combine_row(args, plan, partials, partial, (at.b * args.kv_heads() + at.kv_head + h) * rows + partial % rows);
  });
}

template <class Kv>
void decode_call(const DecodeArgs& args) {
  const int threads = num_threads();
  const DecodePlan plan(args, threads);
  const int64_t bundles = args.batch() * plan.bundles_per_batch(args), rows = plan.heads * plan.rows_per_kv_head(args);
  const int64_t bundle_bytes =
      rows * larger(1, plan.splits) * (plan.padded_ev + 2) * static_cast<int64_t>(sizeof(float));
  const int64_t pass = smaller(bundles, larger(1, kPartialBytes / bundle_bytes));
  TileArena counted;
  PreparedQueries<Kv>{args, plan, counted};
  Partials{pass * rows, plan, counted};
  const Scratch memory(counted.bytes);
  TileArena arena{memory.arena()};
  const PreparedQueries<Kv> queries(args, plan, arena);
  const Partials partials(pass * rows, plan, arena);
  queries.fill(args, plan);
  const int64_t keys = smaller(plan.splits * kSplit, args.kv_length());
  const int worth = threads_worth(bundles * rows * keys * plan.padded_e);
  for (int64_t first = 0; first < bundles; first += pass)
    decode_pass<Kv>(args, plan, queries, partials, first, smaller(pass, bundles - first), worth);
}

// A row of decode, for one format of keys and values.
template <DType kDType>
std::string_view refuses(const DecodeArgs& args) {
  return args.k.dtype == kDType ? "" : "keys and values of another type";
}
template <class Kv>
void run(const DecodeArgs& args) { with_memory(args, decode_call<Kv>); }

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
