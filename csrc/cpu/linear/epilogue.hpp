// SPDX-License-Identifier: Apache-2.0
// The steps on 16 sums before they are stored: column scale, offset of asymmetric activations, bias, activation, mul,
// add, rounding.
#pragma once

#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "ops/linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// row_offset: the factor of column_sum (asymmetric activations), else null. Not inlined: it runs once per 16 k
// products, and in every tile of every size it was two thirds of the code. The sums by reference: cpu/vector_io.hpp.
[[gnu::noinline]] inline void finish(const LinearArgs& args, int64_t row, int64_t panel, const f32x16& sums,
                                     const float* row_offset) {
  const WeightSpec& spec = args.weight_spec;
  const int64_t column = panel * kPanelColumns, count = spec.n - column, at = row * spec.n + column;
  f32x16 value = sums;
  if (!is_float(spec.format)) {
    const uint8_t* header = args.weight + panel * spec.panel_bytes();
    value = mul(value, load(reinterpret_cast<const float*>(header + spec.column_scale_at())));
    if (row_offset)
      value = fma(set1(row_offset[row]), load(reinterpret_cast<const float*>(header + spec.column_sum_at())), value);
  }
  if (args.bias) value = add(value, load_as_float(args.bias, args.bias_dtype, column, count));
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

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
