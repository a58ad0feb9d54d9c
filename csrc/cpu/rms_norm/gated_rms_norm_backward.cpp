// SPDX-License-Identifier: Apache-2.0
// The row of the op gated_rms_norm_backward. With h what is normalized, n = h rsqrt(mean(h^2) + eps) and s the gate:
//   u = dy weight s     dh = (u - n mean(u n)) rsqrt(mean(h^2) + eps)     u lacks s where the gate is first
//   dx = dh             dgate = dy weight n s'      dweight = sum dy n s                norm before gate
//   dx = dh s           dgate = dh x s'             dweight = sum dy n                  gate before norm
// A task is some rows of x, of a number that threads do not change. It adds their gradients of the weight; the sums of
// the tasks are added in order.
#include LOWBIT_ISA_HEADER

#include <algorithm>

#include "ops/gated_rms_norm.hpp"

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/gate_slopes.hpp"
#include "cpu/loops.hpp"
#include "cpu/row_begin.hpp"
#include "cpu/root_mean_square.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kMaxTasks = 64;     // so few that their sums are small beside x
constexpr int64_t kRowProducts = 32;  // products that the gradients of an element take as long as

// Of a group: values become the normalized ones, and slopes the factors of the gate's gradient.
struct Group {
  float *values, *gates, *slopes, *terms;
};

void load_group(const GatedRmsNormArgs& forward, const Group& group, int64_t x_at, int64_t gate_at) {
  const TensorView &x = forward.x, &gate = forward.gate;
  for (int64_t i = 0; i < forward.group_size; i += 16) {
    const int64_t count = forward.group_size - i;
    const f32x16 value = load_as_float(x.data, x.dtype, x_at + i, count);
    const f32x16 of_gate = load_as_float(gate.data, gate.dtype, gate_at + i, count);
    const Slope gated = forward.sigmoid ? sigmoid_and_slope(of_gate) : silu_and_slope(of_gate);
    store(group.gates + i, gated.value);
    store(group.slopes + i, forward.gate_first ? mul(gated.slope, value) : gated.slope);
    store(group.values + i, forward.gate_first ? mul(value, gated.value) : value);
  }
}

// Normalizes the values, stores u, adds to the gradient of the weight; the mean of u n.
f32x16 add_terms(const GatedRmsNormBackwardArgs& args, const Group& group, int64_t channel, int64_t grad_y_at,
                 f32x16 scale, float* of_weight) {
  const GatedRmsNormArgs& forward = args.forward;
  const TensorView &weight = forward.weight, &grad_y = args.grad_y;
  f32x16 total = set1(0.0f);
  for (int64_t i = 0; i < forward.group_size; i += 16) {
    const int64_t count = forward.group_size - i;
    const f32x16 normalized = mul(load(group.values + i), scale);
    const f32x16 grad = load_as_float(grad_y.data, grad_y.dtype, grad_y_at + i, count);
    const f32x16 factor = load_as_float(weight.data, weight.dtype, channel + i, count);
    const f32x16 gated = forward.gate_first ? grad : mul(grad, load(group.gates + i));
    const f32x16 term = mul(gated, factor);
    const f32x16 sum = load_as_float(of_weight, DType::float32, i, count);
    store_from_float(of_weight, DType::float32, i, count, fma(gated, normalized, sum));
    if (!forward.gate_first) store(group.slopes + i, mul(load(group.slopes + i), mul(mul(grad, factor), normalized)));
    store(group.values + i, normalized);
    store(group.terms + i, term);
    total = fma(term, normalized, total);
  }
  return set1(sum(total) / static_cast<float>(forward.group_size));
}

void store_group(const GatedRmsNormBackwardArgs& args, const Group& group, int64_t at, f32x16 scale, f32x16 mean) {
  const GatedRmsNormArgs& forward = args.forward;
  for (int64_t i = 0; i < forward.group_size; i += 16) {
    const int64_t count = forward.group_size - i;
    const f32x16 projected = mul(load(group.values + i), mean);
    const f32x16 grad = mul(sub(load(group.terms + i), projected), scale), slope = load(group.slopes + i);
    store_from_float(args.grad_x.data, args.grad_x.dtype, at + i, count,
                     forward.gate_first ? mul(grad, load(group.gates + i)) : grad);
    store_from_float(args.grad_gate.data, args.grad_gate.dtype, at + i, count,
                     forward.gate_first ? mul(grad, slope) : slope);
  }
}

void run_row(const GatedRmsNormBackwardArgs& args, int64_t row, const Group& group, float* of_weight) {
  const GatedRmsNormArgs& forward = args.forward;
  const int64_t n = forward.x.size(-1), size = forward.group_size;
  const int64_t x_at = begin_of_row(forward.x, row), gate_at = begin_of_row(forward.gate, row);
  const int64_t grad_y_at = begin_of_row(args.grad_y, row);
  for (int64_t channel = 0; channel < n; channel += size) {
    load_group(forward, group, x_at + channel, gate_at + channel);
    const f32x16 scale = reciprocal_root_mean_square(group.values, DType::float32, 0, size, forward.eps);
    const f32x16 mean = add_terms(args, group, channel, grad_y_at + channel, scale, of_weight + channel);
    store_group(args, group, row * n + channel, scale, mean);
  }
}

void run_gated_rms_norm_backward(const GatedRmsNormBackwardArgs& args) {
  const GatedRmsNormArgs& forward = args.forward;
  const int64_t n = forward.x.size(-1), rows = forward.x.numel() / n, size = round_up(forward.group_size, 16);
  const RowTiles tasks(rows, larger(ceil_div(rows, kMaxTasks), larger(1, kSerialProducts / kRowProducts / n)));
  const Scratch scratch(tasks.count * n * int64_t{sizeof(float)});
  float* sums = scratch.as<float>();
  parallel_for(tasks.count, threads_worth(kRowProducts * rows * n), [&](int64_t task) {
    const Scratch memory(4 * size * int64_t{sizeof(float)});
    float* own = memory.as<float>();
    const Group group{own, own + size, own + 2 * size, own + 3 * size};
    std::fill_n(sums + task * n, n, 0.0f);
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++)
      run_row(args, row, group, sums + task * n);
  });
  for (int64_t channel = 0; channel < n; channel += 16) {
    f32x16 total = set1(0.0f);
    for (int64_t task = 0; task < tasks.count; task++)
      total = add(total, load_as_float(sums, DType::float32, task * n + channel, n - channel));
    store_from_float(args.grad_weight.data, args.grad_weight.dtype, channel, n - channel, total);
  }
}

constexpr Kernel<GatedRmsNormBackwardArgs> kRows[] = {
    {LOWBIT_ROW("gated_rms_norm_backward"), never_refuses<GatedRmsNormBackwardArgs>, run_gated_rms_norm_backward}};

}  // namespace

void rms_norm_gated_rms_norm_backward_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
