// SPDX-License-Identifier: Apache-2.0
// The steps on a sum before it is stored: column scale, offset of asymmetric activations, bias, activation, mul, add.
#pragma once

#include "formats/layout_codes.hpp"
#include "gpu/linear/activations.cuh"

namespace lowbit::gpu {

LOWBIT_INLINE float activate(Activation activation, float a) {
  switch (activation) {
    case Activation::none: return a;
    case Activation::relu: return a < 0.0f ? 0.0f : a;  // a if a is nan
    case Activation::gelu: return 0.5f * a * erfcf(-0.70710678f * a);
    case Activation::gelu_tanh: {
      const float half = 0.5f * a;
      return __fmaf_rn(half, tanhf(0.79788456f * __fmaf_rn(a * a * a, 0.044715f, a)), half);
    }
    case Activation::silu: return __fdiv_rn(a, 1.0f + expf(-a));
  }
  return a;
}

// The scales that a sum has still to be multiplied by: for codes that of the column, for activations that of their row.
// The row's comes last, because it may make the result subnormal.
struct PendingScales {
  bool column_scale;
  float row_scale;
};

template <Format kFormat>
LOWBIT_INLINE void finish(const LinearCall& call, int64_t row, int64_t n, float sum, PendingScales pending) {
  const int64_t at = row * call.spec.n + n;
  if constexpr (!is_float(kFormat)) {
    const auto of_column = [&](int64_t section) {
      const auto column = static_cast<uint32_t>(n);  // of panels of a known width: no division
      return *reinterpret_cast<const float*>(call.weight + column / kPanelColumns * call.sections.row_bytes + section +
                                             column % kPanelColumns * 4);
    };
    if (pending.column_scale) sum *= of_column(call.sections.column_scale);
    if (call.x_format == XFormat::int8_row_asymmetric)
      sum = __fmaf_rn(call.row_offset[row], of_column(call.sections.column_sum), sum);
  }
  sum *= pending.row_scale;
  if (call.bias) sum += load_as_float(call.bias, call.bias_dtype, n);
  sum = activate(call.activation, sum);
  if (call.mul) sum *= load_as_float(call.mul, call.dtype, at);
  if (call.add) sum += load_as_float(call.add, call.dtype, at);
  store_from_float(call.y, call.dtype, at, sum);
}

// The sum of a row that holds inf or nan, weight by weight.
template <Format kFormat>
LOWBIT_INLINE float sum_alone(const LinearCall& call, int64_t row, int64_t n) {
  float sum = 0.0f;
  for (int64_t k = 0; k < call.spec.k; k++)
    sum = __fmaf_rn(load_as_float(call.x, call.dtype, row * call.spec.k + k),
                    read_weight<kFormat, PanelLayout>(call.spec, call.sections, call.weight, n, k), sum);
  return sum;
}

}  // namespace lowbit::gpu
