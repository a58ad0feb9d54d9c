// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct RmsNorm : Returns<RmsNorm, &RmsNormArgs::y> {
  static constexpr Text schema =
      "rms_norm(Tensor x, Tensor weight, float eps, float offset, Tensor? add=None) -> Tensor";

  static RmsNormArgs args_of(auto& given) {
    const TensorView x = contiguous_view<"x">(given), weight = contiguous_view<"weight">(given);
    RmsNormArgs args =
        rms_norm_args(x, weight, get<"eps">(given), get<"offset">(given), contiguous_view<"add">(given));
    args.y = contiguous_like(x, x.dtype);
    return args;
  }
};

}  // namespace

const RegisteredOp rms_norm_op = registered<RmsNorm>();

}  // namespace lowbit::torch
