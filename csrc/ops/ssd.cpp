// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

SsdArgs checked(std::string_view op, const SsdArgs& given) {
  SsdArgs args = given;
  const TensorView &x = args.x, &b = args.b;
  args.place = place_of(op, {{"x", x}, {"dt", args.dt}, {"A", args.a}, {"B", b}, {"C", args.c}, {"D", args.d},
                             {"dt_bias", args.dt_bias}, {"state", args.state}, {"cu_seqlens", args.cu_seqlens}});
  check(x.rank == 4 && x.size(2) >= 1 && x.size(3) >= 1, value, op,
        ": x must have shape [B, T, H, P], H and P at least 1, got ", shape_text(x));
  const int64_t batch = args.batch(), tokens = args.tokens(), heads = args.heads();
  check_tokens(op, "x", x, {batch, tokens, heads, args.p()});
  check_tokens(op, "dt", args.dt, {batch, tokens, heads});
  check_numbers(op, "A", args.a, heads);
  check(b.rank == 4 && b.size(2) >= 1 && b.size(3) >= 1, value, op,
        ": B must have shape [B, T, G, S], G and S at least 1, got ", shape_text(b));
  check_tokens(op, "B", b, {batch, tokens, args.groups(), args.s()});
  check_tokens(op, "C", args.c, {batch, tokens, args.groups(), args.s()});
  check_dtype(op, "B", b, x.dtype);
  check_dtype(op, "C", args.c, x.dtype);
  check(heads % args.groups() == 0, value, op, ": the heads of x must be a multiple of the ", args.groups(),
        " groups of B and C, got ", heads);
  check_numbers(op, "D", args.d, heads);
  check_numbers(op, "dt_bias", args.dt_bias, heads);
  check_cu_seqlens(op, args.cu_seqlens, "x", x, "[1, T, H, P]");
  if (args.state)
    check_state(op, args.state, {args.sequences(), heads, args.p(), args.s()});
  check_dt_limit(op, args.dt_min, args.dt_max);
  return args;
}

int64_t bytes_of_inputs(const SsdArgs& args) {
  return bytes_of(args.x) + bytes_of(args.dt) + bytes_of(args.b) + bytes_of(args.c) + bytes_of(args.state);
}

}  // namespace

SsdArgs ssd_args(const SsdArgs& given) { return checked("ssd", given); }

SsdBackwardArgs ssd_backward_args(const SsdBackwardArgs& given) {
  constexpr std::string_view op = "ssd_backward";
  SsdBackwardArgs args = given;
  args.forward = checked(op, given.forward);
  const TensorView &x = args.forward.x, &of_state = args.grad_final_state;
  args.place = place_of(op, {{"x", x}, {"grad_y", args.grad_y}, {"grad_final_state", of_state}});
  check_dtype(op, "grad_y", args.grad_y, x.dtype);
  check_tokens(op, "grad_y", args.grad_y, {x.size(0), x.size(1), x.size(2), x.size(3)});
  if (of_state)
    check_tensor(op, "grad_final_state", of_state, args.forward.state_dtype(),
                 {args.forward.sequences(), x.size(2), x.size(3), args.forward.s()});
  return args;
}

// Two products with the state a token.
Call describe(const SsdArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(args),
              .written = bytes_of(args.y) + bytes_of(args.final_state),
              .operations = 4 * args.x.numel() * args.s()}
      .with(args.x, args.b, args.final_state);
}

// Six products of the size of a state per token: two compute states again, three are with a state or its gradient, one
// steps the gradient back.
Call describe(const SsdBackwardArgs& args) {
  const SsdArgs& forward = args.forward;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(forward) + bytes_of(args.grad_y) + bytes_of(args.grad_final_state),
              .written = bytes_of(args.grad_x) + bytes_of(args.grad_dt) + bytes_of(args.grad_b) +
                         bytes_of(args.grad_c) + bytes_of(args.grad_state),
              .operations = 12 * forward.x.numel() * forward.s()}
      .with(forward.x, forward.b, args.grad_y);
}

}  // namespace lowbit
