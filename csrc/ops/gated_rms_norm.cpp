// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_rms_norm.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/rms_norm.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

GatedRmsNormArgs checked_norm(std::string_view op, const GatedRmsNormArgs& given) {
  GatedRmsNormArgs args = given;
  const TensorView &x = args.x, &gate = args.gate, &weight = args.weight;
  args.place = place_of(op, {{"x", x}, {"gate", gate}, {"weight", weight}});
  check_activation(op, "x", x);
  check(x.rank >= 1 && x.size(-1) >= 1, value, op, ": x must have shape [..., n], n at least 1, got ", shape_text(x));
  check_dense_rows(op, "x", x);
  check_activation(op, "gate", gate);
  check_shape(op, "gate", gate, shape_text(x).sizes);
  check_dense_rows(op, "gate", gate);
  check_activation(op, "weight", weight);
  check_shape(op, "weight", weight, {x.size(-1)});
  check_contiguous(op, "weight", weight);
  check(args.group_size >= 1 && x.size(-1) % args.group_size == 0, value, op, ": group_size must divide the ",
        x.size(-1), " channels of x, got ", args.group_size);
  check_norm(op, args.eps, 0);
  return args;
}

int64_t bytes_of_inputs(const GatedRmsNormArgs& args) {
  return bytes_of(args.x) + bytes_of(args.gate) + bytes_of(args.weight);
}

}  // namespace

GatedRmsNormArgs gated_rms_norm_args(const GatedRmsNormArgs& given) { return checked_norm("gated_rms_norm", given); }

GatedRmsNormBackwardArgs gated_rms_norm_backward_args(const GatedRmsNormBackwardArgs& given) {
  constexpr std::string_view op = "gated_rms_norm_backward";
  GatedRmsNormBackwardArgs args = given;
  args.forward = checked_norm(op, given.forward);
  const TensorView& x = args.forward.x;
  args.place = place_of(op, {{"x", x}, {"grad_y", args.grad_y}});
  check_dtype(op, "grad_y", args.grad_y, x.dtype);
  check_shape(op, "grad_y", args.grad_y, shape_text(x).sizes);
  check_dense_rows(op, "grad_y", args.grad_y);
  return args;
}

Call describe(const GatedRmsNormArgs& args) {
  return Call{.read = bytes_of_inputs(args), .written = bytes_of(args.y)}.with(args.x, args.gate, args.y);
}

Call describe(const GatedRmsNormBackwardArgs& args) {
  return Call{.read = bytes_of_inputs(args.forward) + bytes_of(args.grad_y),
              .written = bytes_of(args.grad_x) + bytes_of(args.grad_gate) + bytes_of(args.grad_weight)}
      .with(args.forward.x, args.forward.gate, args.grad_y);
}

}  // namespace lowbit
