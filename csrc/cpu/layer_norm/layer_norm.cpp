// SPDX-License-Identifier: Apache-2.0
// The row of the op layer_norm. A task is some rows of x; each is read three times, from cache after the first.
#include LOWBIT_ISA_HEADER

#include "ops/layer_norm.hpp"

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Mean of term(i, count) over n elements; the lanes of a term beyond `count` must be 0.
template <class Term>
LOWBIT_INLINE float mean_of(int64_t n, Term term) {
  f32x16 sums[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int part = 0; part < 4; part++) sums[part] = add(sums[part], term(i + 16 * part, 16));
  for (; i < n; i += 16) sums[0] = add(sums[0], term(i, n - i));
  return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))) / static_cast<float>(n);
}

// The first `count` lanes of a, and 0.
LOWBIT_INLINE f32x16 first_lanes(f32x16 a, int64_t count) {
  if (count >= 16) [[likely]] return a;
  alignas(64) float lanes[16];
  store(lanes, a);
  for (int64_t i = count; i < 16; i++) lanes[i] = 0;
  return load(lanes);
}

void normalize(const LayerNormArgs& args, int64_t row) {
  const TensorView &x = args.x, &weight = args.weight, &bias = args.bias, &term = args.add, &y = args.y;
  const int64_t n = x.size(-1), begin = row * n;
  const auto value = [&](int64_t i, int64_t count) { return load_as_float(x.data, x.dtype, begin + i, count); };
  const f32x16 mean = set1(mean_of(n, value));
  const float variance = mean_of(n, [&](int64_t i, int64_t count) {  // around the mean: a difference of sums cancels
    const f32x16 distance = first_lanes(sub(value(i, count), mean), count);
    return mul(distance, distance);
  });
  const f32x16 scale = div(set1(1.0f), sqrt(set1(variance + static_cast<float>(args.eps))));
  const f32x16 offset = set1(static_cast<float>(args.offset));
  for (int64_t i = 0; i < n; i += 16) {
    const int64_t count = n - i;
    f32x16 result = mul(sub(value(i, count), mean), scale);
    if (weight) result = mul(result, add(load_as_float(weight.data, weight.dtype, i, count), offset));
    if (bias) result = add(result, load_as_float(bias.data, bias.dtype, i, count));
    if (term) result = add(result, load_as_float(term.data, term.dtype, begin + i, count));
    store_from_float(y.data, y.dtype, begin + i, count, result);
  }
}

void run_layer_norm(const LayerNormArgs& args) {
  const int64_t n = args.x.size(-1), numel = args.x.numel();
  const RowTiles tasks(numel / n, larger(1, kSerialProducts / 16 / n));
  parallel_for(tasks.count, threads_worth(numel), [&](int64_t task) {
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++) normalize(args, row);
  });
}

constexpr Kernel<LayerNormArgs> kRows[] = {
    {LOWBIT_ROW("layer_norm"), never_refuses<LayerNormArgs>, run_layer_norm}};

}  // namespace

void layer_norm_layer_norm_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
