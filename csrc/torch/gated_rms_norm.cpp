// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_rms_norm.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct GatedRmsNorm : Returns<GatedRmsNorm, &GatedRmsNormArgs::y> {
  static constexpr Text schema =
      "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_size, bool sigmoid=False, "
      "bool gate_first=False) -> Tensor";

  static GatedRmsNormArgs args_of(auto& given) {
    GatedRmsNormArgs args = gated_rms_norm_args({.x = dense_view<"x">(given),
                                                 .gate = dense_view<"gate">(given),
                                                 .weight = contiguous_view<"weight">(given),
                                                 .eps = get<"eps">(given),
                                                 .group_size = get<"group_size">(given),
                                                 .sigmoid = get<"sigmoid">(given),
                                                 .gate_first = get<"gate_first">(given)});
    args.y = contiguous_like(args.x, args.x.dtype);
    return args;
  }
};

}  // namespace

const RegisteredOp gated_rms_norm_op = registered<GatedRmsNorm>();

}  // namespace lowbit::torch
