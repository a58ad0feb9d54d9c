// SPDX-License-Identifier: Apache-2.0
#include "ops/layer_norm.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct LayerNorm : Returns<LayerNorm, &LayerNormArgs::y> {
  static constexpr Text schema =
      "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset=0., Tensor? add=None) -> Tensor";

  static LayerNormArgs args_of(auto& given) {
    const TensorView x = contiguous_view<"x">(given);
    LayerNormArgs args = layer_norm_args(x, contiguous_view<"weight">(given), contiguous_view<"bias">(given),
                                         get<"eps">(given), get<"offset">(given), contiguous_view<"add">(given));
    args.y = contiguous_like(x, x.dtype);
    return args;
  }
};

}  // namespace

const RegisteredOp layer_norm_op = registered<LayerNorm>();

}  // namespace lowbit::torch
