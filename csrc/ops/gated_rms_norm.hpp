// SPDX-License-Identifier: Apache-2.0
// gated_rms_norm: an RMSNorm with a gate, behind the recurrent layers of Mamba-2, Qwen3-Next and Kimi-Linear, over
// groups of group_size consecutive channels; s is silu or sigmoid.
//   y = x rsqrt(mean(x^2) + eps) weight s(gate)                             norm before gate
//   y = h rsqrt(mean(h^2) + eps) weight,  h = x s(gate)                     gate before norm
// Computed in float32 and rounded once.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct GatedRmsNormArgs {
  Place place{};
  TensorView x{}, gate{};  // [..., n], each any of float32, bfloat16 and float16, dense rows, any other strides
  TensorView weight{};     // [n], any of the three dtypes, contiguous
  double eps = 0;
  int64_t group_size = 0;  // a divisor of n
  bool sigmoid = false;    // s is sigmoid, not silu
  bool gate_first = false;
  TensorView y{};          // shape and dtype of x, contiguous: written
};

// Checks all arguments but y.
LOWBIT_API GatedRmsNormArgs gated_rms_norm_args(const GatedRmsNormArgs& given);
LOWBIT_API Call describe(const GatedRmsNormArgs& args);

struct GatedRmsNormBackwardArgs {
  Place place{};
  GatedRmsNormArgs forward{};  // without its result
  TensorView grad_y{};         // shape and dtype of x, dense rows, any other strides
  // Written, contiguous: shapes and dtypes of x, gate and weight. The sums of grad_weight are float32.
  TensorView grad_x{}, grad_gate{}, grad_weight{};
};

// Checks all arguments but the gradients of the inputs.
LOWBIT_API GatedRmsNormBackwardArgs gated_rms_norm_backward_args(const GatedRmsNormBackwardArgs& given);
LOWBIT_API Call describe(const GatedRmsNormBackwardArgs& args);

}  // namespace lowbit
