// SPDX-License-Identifier: Apache-2.0
// The row of the op gated_rms_norm. A task is some rows of x; of a group, what is normalized stays in cache as float32.
#include LOWBIT_ISA_HEADER

#include "ops/gated_rms_norm.hpp"

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/row_begin.hpp"
#include "cpu/root_mean_square.hpp"
#include "cpu/rows.hpp"
#include "cpu/simd/math.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE f32x16 gate_of(const GatedRmsNormArgs& args, int64_t at, int64_t count) {
  const f32x16 gate = load_as_float(args.gate.data, args.gate.dtype, at, count);
  return args.sigmoid ? sigmoid(gate) : silu(gate);
}

void normalize(const GatedRmsNormArgs& args, int64_t row, float* values) {
  const TensorView &x = args.x, &weight = args.weight, &y = args.y;
  const int64_t n = x.size(-1), size = args.group_size;
  const int64_t x_at = begin_of_row(x, row), gate_at = begin_of_row(args.gate, row), y_at = row * n;
  for (int64_t group = 0; group < n; group += size) {
    for (int64_t i = 0; args.gate_first && i < size; i += 16) {
      const f32x16 value = load_as_float(x.data, x.dtype, x_at + group + i, size - i);
      store(values + i, mul(value, gate_of(args, gate_at + group + i, size - i)));
    }
    const TensorView of_values{.data = values, .dtype = DType::float32};
    const TensorView& from = args.gate_first ? of_values : x;
    const int64_t begin = args.gate_first ? 0 : x_at + group;
    const f32x16 scale = reciprocal_root_mean_square(from.data, from.dtype, begin, size, args.eps);
    for (int64_t i = 0; i < size; i += 16) {
      const f32x16 factor = load_as_float(weight.data, weight.dtype, group + i, size - i);
      f32x16 value = mul(mul(load_as_float(from.data, from.dtype, begin + i, size - i), scale), factor);
      if (!args.gate_first) value = mul(value, gate_of(args, gate_at + group + i, size - i));
      store_from_float(y.data, y.dtype, y_at + group + i, size - i, value);
    }
  }
}

void run_gated_rms_norm(const GatedRmsNormArgs& args) {
  const int64_t n = args.x.size(-1), numel = args.x.numel(), gating = 16;  // products that a silu takes as long as
  const RowTiles tasks(numel / n, larger(1, kSerialProducts / 16 / n));
  const int64_t bytes = (args.gate_first ? round_up(args.group_size, 16) : 0) * int64_t{sizeof(float)};
  parallel_for(tasks.count, threads_worth(gating * numel), [&](int64_t task) {
    const Scratch values(bytes);
    for (int64_t row = tasks.begin(task); row < tasks.begin(task + 1); row++)
      normalize(args, row, values.as<float>());
  });
}

constexpr Kernel<GatedRmsNormArgs> kRows[] = {
    {LOWBIT_ROW("gated_rms_norm"), never_refuses<GatedRmsNormArgs>, run_gated_rms_norm}};

}  // namespace

void rms_norm_gated_rms_norm_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
