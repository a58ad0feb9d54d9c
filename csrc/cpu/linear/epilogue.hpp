// SPDX-License-Identifier: Apache-2.0
// The steps on 16 sums before they are stored: column scale, offset of asymmetric activations, bias, activation, mul,
// add, rounding.
#pragma once

#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "ops/linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The steps of `finish` that are the same for all rows of a panel.
struct PanelEnd {
  f32x16 scale, sum, bias;  // sum: of a column's weights
  bool scales;
  LOWBIT_INLINE PanelEnd(const LinearArgs& args, int64_t panel, bool offsets) {
    const WeightSpec& spec = args.weight_spec;
    const uint8_t* header = args.weight + panel * spec.panel_bytes();
    scales = !is_float(spec.format);
    if (scales) scale = load(reinterpret_cast<const float*>(header + spec.column_scale_at()));
    if (offsets) sum = load(reinterpret_cast<const float*>(header + spec.column_sum_at()));
    const int64_t column = panel * kPanelColumns;
    if (args.bias) bias = load_as_float(args.bias, args.bias_dtype, column, spec.n - column);
  }
};

LOWBIT_INLINE void finish_row(const LinearArgs& args, const PanelEnd& end, int64_t row, int64_t panel, f32x16 value,
                              const float* row_offset) {
  const int64_t n = args.weight_spec.n, column = panel * kPanelColumns, count = n - column, at = row * n + column;
  if (end.scales) {
    value = mul(value, end.scale);
    if (row_offset) value = fma(set1(row_offset[row]), end.sum, value);
  }
  if (args.bias) value = add(value, end.bias);
  switch (args.activation) {
    case Activation::none: break;
    case Activation::relu: value = relu(value); break;
    case Activation::gelu: value = gelu(value); break;
    case Activation::gelu_tanh: value = gelu_tanh(value); break;
    case Activation::silu: value = silu(value); break;
  }
  if (args.mul) value = mul(value, load_as_float(args.mul, args.dtype, at, count));
  if (args.add) value = add(value, load_as_float(args.add, args.dtype, at, count));
  store_from_float(args.y, args.dtype, at, count, value);
}

// row_offset: the factor of column_sum (asymmetric activations), else null. Not inlined: it runs once per 16 k
// products, and in every tile of every size it was two thirds of the code. The sums by reference: cpu/vector_io.hpp.
[[gnu::noinline]] inline void finish(const LinearArgs& args, int64_t row, int64_t panel, const f32x16& sums,
                                     const float* row_offset) {
  finish_row(args, PanelEnd(args, panel, row_offset != nullptr), row, panel, sums, row_offset);
}

// The same of rows whose sums lie behind one another, 16 floats each, times the factor of each; a row with factor 0 is
// left out. Without factors all are 1.
[[gnu::noinline, maybe_unused]] void finish_rows(const LinearArgs& args, int64_t row, int64_t count, int64_t panel,
                                                 const float* sums, const float* row_factor, const float* row_offset) {
  const PanelEnd end(args, panel, row_offset != nullptr);
  for (int64_t r = 0; r < count; r++, sums += kPanelColumns) {
    f32x16 value = load(sums);
    if (row_factor) {
      if (row_factor[r] == 0.0f) continue;
      value = mul(value, set1(row_factor[r]));
    }
    finish_row(args, end, row + r, panel, value, row_offset);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
