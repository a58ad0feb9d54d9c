// SPDX-License-Identifier: Apache-2.0
// gather_linear: y[t, j] = x[t or t, j] @ w[index[t, j]].T + bias[index[t, j]], with one of E packed weights of one
// shape per row: the products of a mixture of experts. (MLX: gather_qmm.)
#pragma once

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

struct GatherLinearArgs {
  Place place{};
  WeightSpec weight_spec;  // spec of one weight
  XFormat x_format = XFormat::floating;
  TensorView x;       // [T, k], a row for all of its J weights, or [T, J, k]; float32, bfloat16 or float16, contiguous
  TensorView weight;  // [E, panels, panel_bytes] uint8, contiguous
  TensorView index;   // [T, J] int32 or int64, contiguous: 0 to E - 1; the row checks it before it writes
  TensorView bias;    // [E, n] of the three dtypes, contiguous; or none
  TensorView y{};     // [T, J, n], dtype of x, contiguous: written

  int64_t weights() const { return weight.size(0); }
  int64_t rows() const { return index.numel(); }
  // The row of x that belongs to row `row` of y.
  int64_t row_of_x(int64_t row) const { return x.rank == 2 ? row / index.size(1) : row; }
};

// Checks all arguments but y, except the numbers in `index`.
LOWBIT_API GatherLinearArgs gather_linear_args(const GatherLinearArgs& given, int64_t x_format);
LOWBIT_API Call describe(const GatherLinearArgs& args);

}  // namespace lowbit
