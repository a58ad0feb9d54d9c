// SPDX-License-Identifier: Apache-2.0
#include "ops/causal_conv1d.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

CausalConv1dArgs convolution_of(auto& given) {
  return {.x = dense_view<"x">(given),
          .weight = view<"weight">(given),
          .bias = contiguous_view<"bias">(given),
          .state = view<"state">(given),
          .silu = get<"silu">(given),
          .cu_seqlens = contiguous_view<"cu_seqlens">(given)};
}

TensorView like_convolution_states(const CausalConv1dArgs& args) {
  const int64_t shape[] = {args.sequences(), args.channels(), args.kept()};
  return contiguous_view(args.x.device, args.x.dtype, 3, shape);
}

struct CausalConv1d {
  static constexpr Text schema =
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias=None, Tensor? state=None, bool silu=False, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor)";

  static CausalConv1dArgs args_of(auto& given) {
    CausalConv1dArgs args = causal_conv1d_args(convolution_of(given));
    args.y = contiguous_like(args.x, args.x.dtype);
    args.final_state = like_convolution_states(args);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<CausalConv1d>& given) {
    CausalConv1dArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.y), Tensor::empty(given.op, args.final_state)};
    lowbit::run(args);
    return results;
  }
};

struct CausalConv1dBackward {
  static constexpr Text schema =
      "causal_conv1d_backward(Tensor x, Tensor weight, Tensor grad_y, Tensor? bias=None, Tensor? state=None, "
      "Tensor? grad_final_state=None, bool silu=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor, Tensor)";

  static CausalConv1dBackwardArgs args_of(auto& given) {
    CausalConv1dBackwardArgs args = causal_conv1d_backward_args({.forward = convolution_of(given),
                                                                 .grad_y = dense_view<"grad_y">(given),
                                                                 .grad_final_state = view<"grad_final_state">(given)});
    const CausalConv1dArgs& forward = args.forward;
    const int64_t channels[] = {forward.channels()};
    const TensorView& bias = forward.bias ? forward.bias : forward.weight;
    args.grad_x = contiguous_like(forward.x, forward.x.dtype);
    args.grad_weight = contiguous_like(forward.weight, forward.weight.dtype);
    args.grad_bias = contiguous_view(forward.x.device, bias.dtype, 1, channels);
    args.grad_state = like_convolution_states(forward);
    return args;
  }

  static std::array<Tensor, 4> run(Arguments<CausalConv1dBackward>& given) {
    CausalConv1dBackwardArgs args = args_of(given);
    std::array<Tensor, 4> results{Tensor::empty(given.op, args.grad_x), Tensor::empty(given.op, args.grad_weight),
                                  Tensor::empty(given.op, args.grad_bias), Tensor::empty(given.op, args.grad_state)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp causal_conv1d_op = registered<CausalConv1d>();
const RegisteredOp causal_conv1d_backward_op = registered<CausalConv1dBackward>();

}  // namespace lowbit::torch
