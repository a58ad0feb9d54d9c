// SPDX-License-Identifier: Apache-2.0
// pointwise: y = scale * f(x) + add, element by element, in float32 and rounded once. In a program a gate multiplies
// too, of one element for each row (Qwen2-MoE) or for each element: y = scale * s(gate) * f(x) + add, where s is sigmoid
// or silu (Falcon-H1). A mask is a gate that multiplies as it is. The functions:
//   0  x
//   1  max(x, 0)^2 (So et al., 2021)
//   2  positive * max(x, 0)^2 + negative * (e^min(x, 0) - 1 - min(x, 0)) + linear * x: xIELU (Huang et al., 2024)
#pragma once

#include <optional>

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

enum class Pointwise : int64_t { identity = 0, relu_squared = 1, xielu = 2 };
inline constexpr int64_t kPointwiseFunctions = 3;
enum class GateFunction : int64_t { sigmoid = 0, silu = 1, identity = 2 };

struct PointwiseArgs {
  Place place{};
  TensorView x;    // float32, bfloat16 or float16, contiguous
  Pointwise function = Pointwise::identity;
  double scale = 1;
  TensorView add;  // shape of x, dtype of x or y, contiguous, or empty
  double positive = 0, negative = 0, linear = 0;  // the coefficients of xIELU
  TensorView y;    // shape of x, its dtype or, in a program, another, contiguous: written; may be the memory of x, if
                   // its dtype is the same
  // Dtype of x, or float32 where it is no sigmoid: one element for each row of x, contiguous; or the shape of x, dense
  // rows, any other strides; or empty.
  TensorView gate{};
  GateFunction gate_function = GateFunction::sigmoid;
};

// Checks all arguments but y and gate_function. op is the name in errors, result the dtype of y if that is not of x.
LOWBIT_API PointwiseArgs pointwise_args(const TensorView& x, int64_t function, double scale, const TensorView& add,
                                        double positive, double negative, double linear, const TensorView& gate = {},
                                        std::string_view op = "pointwise", std::optional<DType> result = {});
LOWBIT_API Call describe(const PointwiseArgs& args);

}  // namespace lowbit
