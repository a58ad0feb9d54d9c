// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_rms_norm.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

GatedRmsNormArgs norm_of(auto& given) {
  return {.x = dense_view<"x">(given),
          .gate = dense_view<"gate">(given),
          .weight = contiguous_view<"weight">(given),
          .eps = get<"eps">(given),
          .group_size = get<"group_size">(given),
          .sigmoid = get<"sigmoid">(given),
          .gate_first = get<"gate_first">(given)};
}

struct GatedRmsNorm : Returns<GatedRmsNorm, &GatedRmsNormArgs::y> {
  static constexpr Text schema =
      "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_size, bool sigmoid=False, "
      "bool gate_first=False) -> Tensor";

  static GatedRmsNormArgs args_of(auto& given) {
    GatedRmsNormArgs args = gated_rms_norm_args(norm_of(given));
    args.y = contiguous_like(args.x, args.x.dtype);
    return args;
  }
};

struct GatedRmsNormBackward {
  static constexpr Text schema =
      "gated_rms_norm_backward(Tensor x, Tensor gate, Tensor weight, Tensor grad_y, float eps, int group_size, "
      "bool sigmoid=False, bool gate_first=False) -> (Tensor, Tensor, Tensor)";

  static GatedRmsNormBackwardArgs args_of(auto& given) {
    GatedRmsNormBackwardArgs args =
        gated_rms_norm_backward_args({.forward = norm_of(given), .grad_y = dense_view<"grad_y">(given)});
    const GatedRmsNormArgs& forward = args.forward;
    args.grad_x = contiguous_like(forward.x, forward.x.dtype);
    args.grad_gate = contiguous_like(forward.gate, forward.gate.dtype);
    args.grad_weight = contiguous_like(forward.weight, forward.weight.dtype);
    return args;
  }

  static std::array<Tensor, 3> run(Arguments<GatedRmsNormBackward>& given) {
    GatedRmsNormBackwardArgs args = args_of(given);
    std::array<Tensor, 3> results{Tensor::empty(given.op, args.grad_x), Tensor::empty(given.op, args.grad_gate),
                                  Tensor::empty(given.op, args.grad_weight)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp gated_rms_norm_op = registered<GatedRmsNorm>();
const RegisteredOp gated_rms_norm_backward_op = registered<GatedRmsNormBackward>();

}  // namespace lowbit::torch
