// SPDX-License-Identifier: Apache-2.0
// The row of the op route. A task is some tokens. Scores are computed by vectors, the top k by a scalar scan, since few
// candidates exceed the k best so far. The product of a router comes first (router.hpp), a block of tokens at a time.
#include LOWBIT_ISA_HEADER

#include "ops/route.hpp"

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/route/router.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr float kInfinity = __builtin_inff();

// The numbers of one token, padded to whole vectors.
struct Token {
  float *logits, *scores, *choices, *group_choices;
  int64_t *index_in_group, *groups;

  Token(Arena arena, const RouteArgs& args)
      : logits(arena.array<float>(round_up(args.experts(), 16))),
        scores(arena.array<float>(round_up(args.experts(), 16))),
        choices(arena.array<float>(round_up(args.experts(), 16))),
        group_choices(arena.array<float>(args.groups)),
        index_in_group(arena.array<int64_t>(args.group_top)),
        groups(arena.array<int64_t>(args.groups_kept)),
        bytes(arena.bytes) {}
  int64_t bytes;
};

// exp, but 0 below exp(-87) and for nan.
LOWBIT_INLINE f32x16 exp_or_zero(f32x16 x) {
  return float_of(bit_and(at_least(x, set1(-87.0f)), bits_of(exp(x))));
}

// Logits are padded with -inf to a whole vector. Scores are nan if no logit is finite, or one is inf.
void softmax(const float* logits, int64_t count, float* scores) {
  f32x16 most = set1(-kInfinity), total = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) most = max(most, load(logits + i));
  const f32x16 base = set1(largest(most));
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 value = exp_or_zero(sub(load(logits + i), base));
    total = add(total, value);
    store(scores + i, value);
  }
  const f32x16 sum_of_all = set1(sum(total));
  for (int64_t i = 0; i < count; i += 16) store(scores + i, div(load(scores + i), sum_of_all));
}

// The scores of all logits, or of the chosen ones; may be in slot.
void score(Scoring scoring, const float* logits, int64_t count, float* scores) {
  if (scoring == Scoring::softmax || scoring == Scoring::softmax_of_chosen) return softmax(logits, count, scores);
  if (scoring == Scoring::sqrt_softplus)
    for (int64_t i = 0; i < count; i++) {
      const double x = static_cast<double>(logits[i]);
      scores[i] = static_cast<float>(__builtin_sqrt(x > 40 ? x : __builtin_log1p(__builtin_exp(x))));
    }
  else
    for (int64_t i = 0; i < count; i += 16) {
      const f32x16 x = load(logits + i);
      store(scores + i, float_of(bit_and(at_least(x, set1(-87.0f)), bits_of(sigmoid(x)))));
    }
}

// One row of a tensor as float32, padded with `padding` to a whole vector.
void widen(const TensorView& tensor, int64_t row, float padding, float* values) {
  const int64_t count = tensor.size(-1);
  for (int64_t i = 0; i < count; i += 16)
    store(values + i, load_as_float(tensor.data, tensor.dtype, row * count + i, count - i));
  for (int64_t i = count; i % 16; i++) values[i] = padding;
}

// Indices of the k largest values, in descending order; ties: the first first. Any k if some values are nan.
void find_largest(const float* values, int64_t count, int64_t k, int64_t* found) {
  int64_t size = 0;
  for (int64_t i = 0; i < count; i++) {
    if (size == k && !(values[i] > values[found[k - 1]])) continue;
    int64_t slot = size < k ? size++ : k - 1;
    for (; slot > 0 && values[i] > values[found[slot - 1]]; slot--) found[slot] = found[slot - 1];
    found[slot] = i;
  }
}

// Excludes the choices of all groups that are not kept.
void keep_groups(const RouteArgs& args, const Token& token) {
  const int64_t size = args.experts() / args.groups;
  for (int64_t group = 0; group < args.groups; group++) {
    const float* const choices = token.choices + group * size;
    find_largest(choices, size, args.group_top, token.index_in_group);
    float total = 0;
    for (int64_t i = 0; i < args.group_top; i++) total += choices[token.index_in_group[i]];
    token.group_choices[group] = total;
  }
  find_largest(token.group_choices, args.groups, args.groups_kept, token.groups);
  for (int64_t group = 0; group < args.groups; group++) {
    bool kept = false;
    for (int64_t i = 0; i < args.groups_kept; i++) kept |= token.groups[i] == group;
    for (int64_t i = 0; i < size && !kept; i++) token.choices[group * size + i] = args.zero_outside ? 0.0f : -kInfinity;
  }
}

float one_of(const TensorView& tensor, int64_t at) {
  alignas(64) float lanes[16];
  store(lanes, load_as_float(tensor.data, tensor.dtype, at, 1));
  return lanes[0];
}

void write_weights(const RouteArgs& args, const Token& token, const int64_t* index, float* weights) {
  const bool of_chosen = args.scoring >= Scoring::softmax_of_chosen;
  float* const chosen = token.choices;  // the choices are no longer needed
  for (int64_t i = 0; i < args.k; i++) chosen[i] = (of_chosen ? token.logits : token.scores)[index[i]];
  for (int64_t i = args.k; i % 16; i++) chosen[i] = -kInfinity;
  if (of_chosen) score(args.scoring, chosen, args.k, chosen);
  float divisor = 1;
  if (args.normalize) {
    float total = 0;
    for (int64_t i = 0; i < args.k; i++) total += chosen[i];
    total += static_cast<float>(args.eps);
    divisor = total < static_cast<float>(args.least) ? static_cast<float>(args.least) : total;
  }
  for (int64_t i = 0; i < args.k; i++) {
    const float of_expert = args.expert_scale ? one_of(args.expert_scale, index[i]) : 1.0f;
    weights[i] = chosen[i] / divisor * static_cast<float>(args.scale) * of_expert;
  }
}

bool has_nan(const float* values, int64_t count) {
  bool ordered = true;
  for (int64_t i = 0; i < count; i += 16) ordered &= all_at_most(load(values + i), set1(kInfinity));
  return !ordered;
}

// Chooses the experts of a token; false if a choice is nan.
bool choose(const RouteArgs& args, int64_t row, const Token& token, int64_t* index) {
  const int64_t experts = args.experts();
  const bool of_chosen = args.scoring >= Scoring::softmax_of_chosen;
  widen(args.logits, row, -kInfinity, token.logits);
  if (has_nan(token.logits, experts)) return false;
  if (!of_chosen) score(args.scoring, token.logits, experts, token.scores);
  const float* const values = of_chosen ? token.logits : token.scores;
  if (args.correction) widen(args.correction, 0, 0, token.choices);
  for (int64_t i = 0; i < experts; i += 16) {
    const f32x16 value = load(values + i);
    store(token.choices + i, args.correction ? add(value, load(token.choices + i)) : value);
  }
  if (has_nan(token.choices, experts)) return false;
  if (args.groups_kept < args.groups) keep_groups(args, token);
  find_largest(token.choices, experts, args.k, index);
  return true;
}

void route(const RouteArgs& args, int64_t row, const Token& token) {
  int64_t* const index = args.index.as<int64_t>() + row * args.k;
  float* const weights = args.weights.as<float>() + row * args.k;
  if (choose(args, row, token, index)) return write_weights(args, token, index, weights);
  for (int64_t i = 0; i < args.k; i++) index[i] = i, weights[i] = __builtin_nanf("");
}

void route_all(const RouteArgs& args) {
  const int64_t tokens = args.tokens(), experts = args.experts();
  const int64_t bytes = Token({}, args).bytes;
  const RowTiles tasks(tokens, larger(1, kSerialProducts / 64 / experts));
  parallel_for(tasks.count, threads_worth(tokens * experts * 8), [&](int64_t task) {
    const Scratch scratch(bytes);
    const Token token(scratch.arena(), args);
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++) route(args, row, token);
  });
}

// `count` rows of a contiguous matrix from row `first` on.
TensorView some_rows(TensorView matrix, int64_t first, int64_t count) {
  const int64_t bytes = matrix.size(1) * static_cast<int64_t>(size_of(matrix.dtype));
  matrix.data = static_cast<char*>(matrix.data) + first * bytes;
  matrix.shape[0] = count;
  return matrix;
}

void run_route(const RouteArgs& args) {
  if (!args.router.weight) return route_all(args);
  const RowTiles blocks(args.tokens(), 1024);  // the logits of a block stay in L2
  const Scratch scratch(ceil_div(args.tokens(), blocks.count) * args.experts() * int64_t{sizeof(float)});
  for (int64_t i = 0; i < blocks.count; i++) {
    const int64_t first = blocks.begin(i), count = blocks.height(i);
    RouteArgs block = args;
    block.router.x = some_rows(args.router.x, first, count);
    block.weights = some_rows(args.weights, first, count), block.index = some_rows(args.index, first, count);
    block.logits.shape[0] = count, block.logits.data = scratch.as<float>();
    write_logits(block.router, block.logits);
    route_all(block);
  }
}

constexpr Kernel<RouteArgs> kRows[] = {{LOWBIT_ROW("route"), never_refuses<RouteArgs>, run_route}};

}  // namespace

void route_route_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
