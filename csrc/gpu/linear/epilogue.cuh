// SPDX-License-Identifier: Apache-2.0
// The operations on a sum before it is stored: column scale, offset of asymmetric activations, bias,
// activation, mul, add.
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

// The scales still to be applied to a sum: for codes that of the column, for activations that of their row. The row's
// comes last, because it may make the result subnormal.
struct PendingScales {
  bool column_scale;
  float row_scale;
};

// The numbers of a column that the epilogue needs. (Column indices have 32 bits: with panels of a constant width there
// is no division.)
struct ColumnEnds {
  float scale, sum, bias;

  template <Format kFormat>
  LOWBIT_INLINE static ColumnEnds of(const LinearCall& call, int64_t n) {
    const auto column = static_cast<uint32_t>(n);
    const auto of_column = [&](int64_t section) {
      return *reinterpret_cast<const float*>(call.weight + column / kPanelColumns * call.sections.row_bytes + section +
                                             column % kPanelColumns * 4);
    };
    ColumnEnds ends{1.0f, 0.0f, 0.0f};
    if constexpr (!is_float(kFormat)) {
      ends.scale = of_column(call.sections.column_scale);
      if (call.x_format == XFormat::int8_row_asymmetric) ends.sum = of_column(call.sections.column_sum);
    }
    if (call.bias) ends.bias = load_as_float(call.bias, call.bias_dtype, n);
    return ends;
  }
};

template <Format kFormat>
LOWBIT_INLINE float finished(const LinearCall& call, const ColumnEnds& ends, int64_t row, int64_t at, float sum,
                             PendingScales pending) {
  if constexpr (!is_float(kFormat)) {
    if (pending.column_scale) sum *= ends.scale;
    if (call.x_format == XFormat::int8_row_asymmetric) sum = __fmaf_rn(call.row_offset[row], ends.sum, sum);
  }
  sum *= pending.row_scale;
  if (call.bias) sum += ends.bias;
  sum = activate(call.activation, sum);
  if (call.mul) sum *= load_as_float(call.mul, call.dtype, at);
  if (call.add) sum += load_as_float(call.add, call.dtype, at);
  return sum;
}

template <Format kFormat>
LOWBIT_INLINE void finish(const LinearCall& call, int64_t row, int64_t n, float sum, PendingScales pending) {
  const int64_t at = row * call.spec.n + n;
  store_from_float(call.y, call.dtype, at,
                   finished<kFormat>(call, ColumnEnds::of<kFormat>(call, n), row, at, sum, pending));
}

// Four adjacent results, of columns from n on: in one store if rows begin at multiples of four.
LOWBIT_INLINE void store_four(const LinearCall& call, int64_t row, int64_t n, const float (&value)[4]) {
  const int64_t at = row * call.spec.n + n;
  if (n + 4 <= call.spec.n && call.spec.n % 4 == 0 && reinterpret_cast<std::size_t>(call.y) % 16 == 0) {
    if (call.dtype == DType::float32) {
      static_cast<uint4*>(call.y)[at / 4] = {__float_as_uint(value[0]), __float_as_uint(value[1]),
                                             __float_as_uint(value[2]), __float_as_uint(value[3])};
    } else {
      static_cast<uint2*>(call.y)[at / 4] = {pair_of(call.dtype, value[0], value[1]),
                                             pair_of(call.dtype, value[2], value[3])};
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
    if (n + i < call.spec.n) store_from_float(call.y, call.dtype, at + i, value[i]);
}

// The dot product of a row that contains inf or nan, weight by weight.
template <Format kFormat>
LOWBIT_INLINE float nonfinite_dot(const LinearCall& call, int64_t row, int64_t n) {
  float sum = 0.0f;
  for (int64_t k = 0; k < call.spec.k; k++)
    sum = __fmaf_rn(load_as_float(call.x, call.dtype, row * call.spec.k + k),
                    read_weight<kFormat, PanelLayout>(call.spec, call.sections, call.weight, n, k), sum);
  return sum;
}

}  // namespace lowbit::gpu
