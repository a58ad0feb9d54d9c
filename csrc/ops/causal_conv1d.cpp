// SPDX-License-Identifier: Apache-2.0
#include "ops/causal_conv1d.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

CausalConv1dArgs checked_convolution(std::string_view op, const CausalConv1dArgs& given) {
  CausalConv1dArgs args = given;
  const TensorView &x = args.x, &weight = args.weight, &bias = args.bias, &state = args.state;
  args.place = place_of(op, {{"x", x}, {"weight", weight}, {"bias", bias}, {"state", state},
                             {"cu_seqlens", args.cu_seqlens}});
  check_activation(op, "x", x);
  check(x.rank == 3 && x.size(2) >= 1, value, op, ": x must have shape [B, T, D], D at least 1, got ", shape_text(x));
  check_dense_rows(op, "x", x);
  check_activation(op, "weight", weight);
  check(weight.rank == 2 && weight.size(0) == args.channels() && weight.size(1) >= 2 && weight.size(1) <= kMaxTaps,
        value, op, ": weight must have shape [", args.channels(), ", K] with K from 2 to ", kMaxTaps, ", got ",
        shape_text(weight));
  if (bias) {
    check_activation(op, "bias", bias);
    check_shape(op, "bias", bias, {args.channels()});
    check_contiguous(op, "bias", bias);
  }
  check_cu_seqlens(op, args.cu_seqlens, "x", x, "[1, T, D]");
  if (state) {
    check_dtype(op, "state", state, x.dtype);
    check(state.rank == 3 && state.size(0) == args.sequences() && state.size(1) == args.channels() &&
              state.size(2) >= args.taps() - 1 && state.size(2) <= kMaxTaps,
          value, op, ": state must have shape [", args.sequences(), ", ", args.channels(), ", S] with S from ",
          args.taps() - 1, " to ", kMaxTaps, ", got ", shape_text(state));
  }
  return args;
}

int64_t bytes_of_inputs(const CausalConv1dArgs& args) {
  return bytes_of(args.x) + bytes_of(args.weight) + bytes_of(args.bias) + bytes_of(args.state);
}

}  // namespace

CausalConv1dArgs causal_conv1d_args(const CausalConv1dArgs& given) {
  return checked_convolution("causal_conv1d", given);
}

CausalConv1dBackwardArgs causal_conv1d_backward_args(const CausalConv1dBackwardArgs& given) {
  constexpr std::string_view op = "causal_conv1d_backward";
  CausalConv1dBackwardArgs args = given;
  args.forward = checked_convolution(op, given.forward);
  const CausalConv1dArgs& forward = args.forward;
  const TensorView &x = forward.x, &of_state = args.grad_final_state;
  args.place = place_of(op, {{"x", x}, {"grad_y", args.grad_y}, {"grad_final_state", of_state}});
  check_dtype(op, "grad_y", args.grad_y, x.dtype);
  check_shape(op, "grad_y", args.grad_y, shape_text(x).sizes);
  check_dense_rows(op, "grad_y", args.grad_y);
  if (of_state) {
    check_dtype(op, "grad_final_state", of_state, x.dtype);
    check_shape(op, "grad_final_state", of_state, {forward.sequences(), forward.channels(), forward.kept()});
  }
  return args;
}

Call describe(const CausalConv1dArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(args),
              .written = bytes_of(args.y) + bytes_of(args.final_state),
              .operations = 2 * args.x.numel() * args.taps()}
      .with(args.x, args.weight, args.y);
}

// The convolution again, and the two products of its gradients.
Call describe(const CausalConv1dBackwardArgs& args) {
  const CausalConv1dArgs& forward = args.forward;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(forward) + bytes_of(args.grad_y) + bytes_of(args.grad_final_state),
              .written = bytes_of(args.grad_x) + bytes_of(args.grad_weight) + bytes_of(args.grad_bias) +
                         bytes_of(args.grad_state),
              .operations = 6 * forward.x.numel() * forward.taps()}
      .with(forward.x, forward.weight, args.grad_y);
}

}  // namespace lowbit
