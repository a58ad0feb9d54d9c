// SPDX-License-Identifier: Apache-2.0
#include "ops/selective_scan.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

SelectiveScanArgs checked(std::string_view op, const SelectiveScanArgs& given) {
  SelectiveScanArgs args = given;
  const TensorView &x = args.x, &a = args.a, &b = args.b;
  args.place = place_of(op, {{"x", x}, {"dt", args.dt}, {"A", a}, {"B", b}, {"C", args.c}, {"D", args.d}, {"z", args.z},
                             {"dt_bias", args.dt_bias}, {"state", args.state}, {"cu_seqlens", args.cu_seqlens}});
  check(x.rank == 3 && x.size(2) >= 1, value, op, ": x must have shape [B, T, D], D at least 1, got ", shape_text(x));
  const int64_t batch = args.batch(), tokens = args.tokens(), channels = args.channels();
  check_tokens(op, "x", x, {batch, tokens, channels});
  check_tokens(op, "dt", args.dt, {batch, tokens, channels});
  check(b.rank == 4 && b.size(2) >= 1 && b.size(3) >= 1, value, op,
        ": B must have shape [B, T, G, S], G and S at least 1, got ", shape_text(b));
  check_activation(op, "A", a);
  check_shape(op, "A", a, {channels, args.s()});
  check_contiguous(op, "A", a);
  check_tokens(op, "B", b, {batch, tokens, args.groups(), args.s()});
  check_tokens(op, "C", args.c, {batch, tokens, args.groups(), args.s()});
  check_dtype(op, "B", b, x.dtype);
  check_dtype(op, "C", args.c, x.dtype);
  check(channels % args.groups() == 0, value, op, ": the channels of x must be a multiple of the ", args.groups(),
        " groups of B and C, got ", channels);
  check_numbers(op, "D", args.d, channels);
  check_numbers(op, "dt_bias", args.dt_bias, channels);
  if (args.z) {
    check_dtype(op, "z", args.z, x.dtype);
    check_tokens(op, "z", args.z, {batch, tokens, channels});
  }
  check_cu_seqlens(op, args.cu_seqlens, "x", x, "[1, T, D]");
  if (args.state) check_state(op, args.state, {args.sequences(), channels, args.s()});
  check_dt_limit(op, args.dt_min, args.dt_max);
  return args;
}

int64_t bytes_of_inputs(const SelectiveScanArgs& args) {
  return bytes_of(args.x) + bytes_of(args.dt) + bytes_of(args.a) + bytes_of(args.b) + bytes_of(args.c) +
         bytes_of(args.z) + bytes_of(args.state);
}

}  // namespace

SelectiveScanArgs selective_scan_args(const SelectiveScanArgs& given) { return checked("selective_scan", given); }

SelectiveScanBackwardArgs selective_scan_backward_args(const SelectiveScanBackwardArgs& given) {
  constexpr std::string_view op = "selective_scan_backward";
  SelectiveScanBackwardArgs args = given;
  args.forward = checked(op, given.forward);
  const TensorView &x = args.forward.x, &of_state = args.grad_final_state;
  args.place = place_of(op, {{"x", x}, {"grad_y", args.grad_y}, {"grad_final_state", of_state}});
  check_dtype(op, "grad_y", args.grad_y, x.dtype);
  check_tokens(op, "grad_y", args.grad_y, {x.size(0), x.size(1), x.size(2)});
  if (of_state)
    check_tensor(op, "grad_final_state", of_state, args.forward.state_dtype(),
                 {args.forward.sequences(), x.size(2), args.forward.s()});
  return args;
}

// Four products for each number of a state a token: with delta, what is added, what is kept, what is read. The
// exponential is not counted.
Call describe(const SelectiveScanArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(args),
              .written = bytes_of(args.y) + bytes_of(args.final_state),
              .operations = 8 * args.x.numel() * args.s()}
      .with(args.x, args.b, args.final_state);
}

// Seven of these compute states again, twice but for what is read; eight are with a state or its gradient.
Call describe(const SelectiveScanBackwardArgs& args) {
  const SelectiveScanArgs& forward = args.forward;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(forward) + bytes_of(args.grad_y) + bytes_of(args.grad_final_state),
              .written = bytes_of(args.grad_x) + bytes_of(args.grad_dt) + bytes_of(args.grad_a) +
                         bytes_of(args.grad_b) + bytes_of(args.grad_c) + bytes_of(args.grad_z) +
                         bytes_of(args.grad_state),
              .operations = 30 * forward.x.numel() * forward.s()}
      .with(forward.x, forward.b, args.grad_y);
}

}  // namespace lowbit
