// SPDX-License-Identifier: Apache-2.0
// fake_quantize: a float weight [n, k] quantized and dequantized without being packed; its gradient; and the same for
// activations. Scales, codes and rounding are those of quantize and of the kernels of linear.
//
//   out = scale * (code - zero),  code = nearest(weight / scale + zero),  a lookup format: scale * level[code]
//   backward (straight through): grad_weight = grad where the code was not clipped, else 0
//     grad_scale = sum over a group of grad * (code - zero - ratio), ratio = weight / scale, or 0 where it was clipped
//
// A code is clipped if it would round past the ends of the format; for a lookup format, if weight / scale exceeds its
// range by more than the relative 2^-10 that rounding the scale may cause. Activations are never clipped, as their
// scales come from their own ranges: their gradient is that of the result, and needs no op.
#pragma once

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "formats/scales.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

struct FakeQuantizeArgs {
  Place place{};
  WeightSpec spec;
  Mapping mapping = Mapping::symmetric;
  TensorView weight;         // [n, k] float32, bfloat16 or float16, contiguous
  TensorView given_scale{};  // float32 [n, groups], contiguous; or none: computed from the range of each group
  TensorView given_zero{};   // likewise, beside given_scale of an asymmetric weight
  TensorView out{};          // [n, k], dtype of weight, or uint8 for the codes: written
  TensorView scale{};        // float32 [n, groups], rounded as for storage: written
  TensorView zero{};         // likewise
};

struct FakeQuantizeBackwardArgs {
  Place place{};
  WeightSpec spec;
  TensorView grad, weight;  // [n, k] of one dtype, contiguous; grad becomes grad_weight, in place
  TensorView scale, zero;   // what fake_quantize wrote
  TensorView grad_scale{};  // float32 [n, groups]: written; or none
};

struct FakeQuantizeActivationsArgs {
  Place place{};
  XFormat x_format = XFormat::int8_row;
  int64_t group_size = 0;  // group size of int8_group; 0: per row
  TensorView x;            // [..., k] float32, bfloat16 or float16, contiguous
  TensorView out{};        // shape and dtype of x: written
};

// Checks all arguments but the results. mapping and x_format are enumerators.
LOWBIT_API FakeQuantizeArgs fake_quantize_args(const TensorView& weight, int64_t format, int64_t group_size,
                                               int64_t mapping, const TensorView& scale, const TensorView& zero);
LOWBIT_API FakeQuantizeBackwardArgs fake_quantize_backward_args(const TensorView& grad, const TensorView& weight,
                                                                const TensorView& scale, const TensorView& zero,
                                                                int64_t format, int64_t group_size);
LOWBIT_API FakeQuantizeActivationsArgs fake_quantize_activations_args(const TensorView& x, int64_t x_format,
                                                                      int64_t group_size);

LOWBIT_API Call describe(const FakeQuantizeArgs& args);
LOWBIT_API Call describe(const FakeQuantizeBackwardArgs& args);
LOWBIT_API Call describe(const FakeQuantizeActivationsArgs& args);

}  // namespace lowbit
