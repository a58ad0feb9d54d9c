// SPDX-License-Identifier: Apache-2.0
#include "ops/pointwise.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct PointwiseOp : Returns<PointwiseOp, &PointwiseArgs::y> {
  static constexpr Text schema =
      "pointwise(Tensor x, int function=0, float scale=1., Tensor? add=None, float positive=0., float negative=0., "
      "float linear=0.) -> Tensor";

  static PointwiseArgs args_of(auto& given) {
    const TensorView x = contiguous_view<"x">(given);
    PointwiseArgs args =
        pointwise_args(x, get<"function">(given), get<"scale">(given), contiguous_view<"add">(given),
                       get<"positive">(given), get<"negative">(given), get<"linear">(given));
    args.y = contiguous_like(x, x.dtype);
    return args;
  }
};

}  // namespace

const RegisteredOp pointwise_op = registered<PointwiseOp>();

}  // namespace lowbit::torch
