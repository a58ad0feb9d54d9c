// SPDX-License-Identifier: Apache-2.0
// rms_norm (Zhang and Sennrich, 2019): y = x * rsqrt(mean(x^2) + eps) * (offset + weight) + add, mean over the last
// dimension. Computed in float32 and rounded once. offset is 1 for Gemma's weights, which are stored around 0, else 0.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct RmsNormArgs {
  Place place{};
  TensorView x;       // [..., n] float32, bfloat16 or float16, contiguous
  TensorView weight;  // [n], any of the three dtypes, contiguous
  double eps = 0, offset = 0;
  TensorView add;     // shape and dtype of x, contiguous, or empty
  TensorView y;       // shape and dtype of x, contiguous: written
};

// Checks all arguments but y.
LOWBIT_API RmsNormArgs rms_norm_args(const TensorView& x, const TensorView& weight, double eps, double offset,
                                     const TensorView& add);
LOWBIT_API Call describe(const RmsNormArgs& args);

// Checks eps and offset, for all ops that normalize.
void check_norm(std::string_view op, double eps, double offset);

}  // namespace lowbit
