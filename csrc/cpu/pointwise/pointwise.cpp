// SPDX-License-Identifier: Apache-2.0
// The row of the op pointwise. A task is a range of elements, or with a gate some rows of x. A vector is read before it
// is written, so that y may be the memory of x.
#include LOWBIT_ISA_HEADER

#include "ops/pointwise.hpp"

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/row_begin.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE f32x16 value_of(const PointwiseArgs& args, f32x16 x) {
  const f32x16 zero = set1(0.0f);
  if (args.function == Pointwise::identity) return x;
  const f32x16 above = max(zero, x), square = mul(above, above);  // a nan stays one
  if (args.function == Pointwise::relu_squared) return square;
  const f32x16 below = min(zero, x), curve = sub(sub(exp(below), set1(1.0f)), below);
  const f32x16 line = mul(x, set1(static_cast<float>(args.linear)));
  return fma(square, set1(static_cast<float>(args.positive)),
             fma(curve, set1(static_cast<float>(args.negative)), line));
}

// The elements from begin to end, where factor(i, count) is that of those from i on.
template <class Factor>
LOWBIT_INLINE void compute(const PointwiseArgs& args, int64_t begin, int64_t end, Factor factor) {
  const TensorView &x = args.x, &term = args.add, &y = args.y;
  for (int64_t i = begin; i < end; i += 16) {
    const f32x16 value = value_of(args, load_as_float(x.data, x.dtype, i, end - i)), scale = factor(i, end - i);
    const f32x16 result =
        term ? fma(value, scale, load_as_float(term.data, term.dtype, i, end - i)) : mul(value, scale);
    store_from_float(y.data, y.dtype, i, end - i, result);
  }
}

// The factors of a gate from element `at` on.
LOWBIT_INLINE f32x16 gated(const PointwiseArgs& args, f32x16 scale, int64_t at, int64_t count) {
  const f32x16 gate = load_as_float(args.gate.data, args.gate.dtype, at, count);
  if (args.gate_function == GateFunction::identity) return mul(scale, gate);
  return mul(scale, args.gate_function == GateFunction::silu ? silu(gate) : sigmoid(gate));
}

void compute_row(const PointwiseArgs& args, f32x16 scale, int64_t row) {
  const int64_t n = args.x.size(-1), begin = row * n;
  if (args.gate.size(-1) == n) {
    const int64_t gate = begin_of_row(args.gate, row) - begin;
    return compute(args, begin, begin + n,
                   [&](int64_t i, int64_t count) { return gated(args, scale, gate + i, count); });
  }
  alignas(64) float lanes[16];
  store(lanes, gated(args, scale, row, 1));
  compute(args, begin, begin + n, [factor = set1(lanes[0])](int64_t, int64_t) { return factor; });
}

void run_pointwise(const PointwiseArgs& args) {
  const int64_t numel = args.x.numel();
  const f32x16 scale = set1(static_cast<float>(args.scale));
  const int64_t length = args.gate ? args.x.size(-1) : 16, count = ceil_div(numel, length);
  const RowTiles tasks(count, larger(1, kSerialProducts / 16 / length));
  parallel_for(tasks.count, threads_worth(numel), [&](int64_t task) {
    const int64_t begin = tasks.begin(task), end = tasks.begin(task + 1);
    if (!args.gate)
      return compute(args, begin * length, smaller(end * length, numel), [&](int64_t, int64_t) { return scale; });
    for (int64_t row = begin; row < end; row++) compute_row(args, scale, row);
  });
}

constexpr Kernel<PointwiseArgs> kRows[] = {
    {LOWBIT_ROW("pointwise"), never_refuses<PointwiseArgs>, run_pointwise}};

}  // namespace

void pointwise_pointwise_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
