// SPDX-License-Identifier: Apache-2.0
// layer_norm (Ba et al., 2016): y = (x - mean(x)) * rsqrt(var(x) + eps) * (offset + weight) + bias + add, mean and
// variance over the last dimension. Computed in float32 and rounded once. offset is 1 for Nemotron's weights, else 0.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct LayerNormArgs {
  Place place{};
  TensorView x;             // [..., n] float32, bfloat16 or float16, contiguous
  TensorView weight, bias;  // [n], any of the three dtypes, contiguous; or empty: factor 1, nothing added
  double eps = 0, offset = 0;
  TensorView add;           // shape and dtype of x, contiguous, or empty
  TensorView y;             // shape and dtype of x, contiguous: written
};

// Checks all arguments but y.
LOWBIT_API LayerNormArgs layer_norm_args(const TensorView& x, const TensorView& weight, const TensorView& bias,
                                         double eps, double offset, const TensorView& add);
LOWBIT_API Call describe(const LayerNormArgs& args);

}  // namespace lowbit
