// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta_rule.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

TensorView like_states(const GatedDeltaRuleArgs& args) {
  const int64_t shape[] = {args.sequences(), args.heads(), args.dk(), args.dv()};
  return contiguous_view(args.v.device, args.state_dtype(), 4, shape);
}

GatedDeltaRuleArgs inputs_of(auto& given) {
  return {.q = dense_view<"q">(given),
          .k = dense_view<"k">(given),
          .v = dense_view<"v">(given),
          .g = dense_view<"g">(given),
          .beta = dense_view<"beta">(given),
          .state = contiguous_view<"state">(given),
          .cu_seqlens = contiguous_view<"cu_seqlens">(given),
          .l2norm = get<"l2norm">(given),
          .scale = get<"scale">(given)};
}

struct GatedDeltaRule {
  static constexpr Text schema =
      "gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? state=None, bool l2norm=False, "
      "float scale=1., Tensor? cu_seqlens=None) -> (Tensor, Tensor)";

  static GatedDeltaRuleArgs args_of(auto& given) {
    GatedDeltaRuleArgs args = gated_delta_rule_args(inputs_of(given));
    args.o = contiguous_like(args.v, args.v.dtype);
    args.final_state = like_states(args);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<GatedDeltaRule>& given) {
    GatedDeltaRuleArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.o), Tensor::empty(given.op, args.final_state)};
    lowbit::run(args);
    return results;
  }
};

struct GatedDeltaRuleBackward {
  static constexpr Text schema =
      "gated_delta_rule_backward(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor grad_o, Tensor? "
      "state=None, Tensor? grad_final_state=None, bool l2norm=False, float scale=1., Tensor? cu_seqlens=None) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";

  static GatedDeltaRuleBackwardArgs args_of(auto& given) {
    GatedDeltaRuleBackwardArgs args =
        gated_delta_rule_backward_args({.forward = inputs_of(given),
                                        .grad_o = dense_view<"grad_o">(given),
                                        .grad_final_state = contiguous_view<"grad_final_state">(given)});
    const GatedDeltaRuleArgs& forward = args.forward;
    const auto like = [](const TensorView& input) { return contiguous_like(input, input.dtype); };
    args.grad_q = like(forward.q), args.grad_k = like(forward.k), args.grad_v = like(forward.v);
    args.grad_g = like(forward.g), args.grad_beta = like(forward.beta), args.grad_state = like_states(forward);
    return args;
  }

  static std::array<Tensor, 6> run(Arguments<GatedDeltaRuleBackward>& given) {
    GatedDeltaRuleBackwardArgs args = args_of(given);
    std::array<Tensor, 6> results{Tensor::empty(given.op, args.grad_q), Tensor::empty(given.op, args.grad_k),
                                  Tensor::empty(given.op, args.grad_v), Tensor::empty(given.op, args.grad_g),
                                  Tensor::empty(given.op, args.grad_beta), Tensor::empty(given.op, args.grad_state)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp gated_delta_rule_op = registered<GatedDeltaRule>();
const RegisteredOp gated_delta_rule_backward_op = registered<GatedDeltaRuleBackward>();

}  // namespace lowbit::torch
