// SPDX-License-Identifier: Apache-2.0
#include "ops/selective_scan.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

TensorView like_states(const SelectiveScanArgs& args) {
  const int64_t shape[] = {args.sequences(), args.channels(), args.s()};
  return contiguous_view(args.x.device, args.state_dtype(), 3, shape);
}

SelectiveScanArgs inputs_of_scan(auto& given, const TensorView& state) {
  return {.x = dense_view<"x">(given),
          .dt = dense_view<"dt">(given),
          .a = contiguous_view<"A">(given),
          .b = dense_view<"B">(given),
          .c = dense_view<"C">(given),
          .d = contiguous_view<"D">(given),
          .dt_bias = contiguous_view<"dt_bias">(given),
          .z = dense_view<"z">(given),
          .state = state,
          .softplus = get<"softplus">(given),
          .dt_min = get<"dt_min">(given),
          .dt_max = get<"dt_max">(given),
          .cu_seqlens = contiguous_view<"cu_seqlens">(given)};
}

struct SelectiveScan {
  static constexpr Text schema =
      "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, float dt_min, float dt_max, Tensor? D=None, "
      "Tensor? z=None, Tensor? dt_bias=None, Tensor? state=None, bool softplus=False, Tensor? cu_seqlens=None) -> "
      "(Tensor, Tensor)";

  static SelectiveScanArgs args_of(auto& given) {
    SelectiveScanArgs args = selective_scan_args(inputs_of_scan(given, contiguous_view<"state">(given)));
    args.y = contiguous_like(args.x, args.x.dtype);
    args.final_state = like_states(args);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<SelectiveScan>& given) {
    SelectiveScanArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.y), Tensor::empty(given.op, args.final_state)};
    lowbit::run(args);
    return results;
  }
};

// The same, with the new state in the place of the old one.
struct SelectiveScanInPlace : Returns<SelectiveScanInPlace, &SelectiveScanArgs::y, &SelectiveScanArgs::state> {
  static constexpr Text schema =
      "selective_scan_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, float dt_min, float "
      "dt_max, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, bool softplus=False, Tensor? cu_seqlens=None) -> "
      "Tensor";

  static SelectiveScanArgs args_of(auto& given) {
    SelectiveScanArgs args = selective_scan_args(inputs_of_scan(given, written_view<"state">(given)));
    args.y = contiguous_like(args.x, args.x.dtype);
    args.final_state = args.state;
    return args;
  }
};

struct SelectiveScanBackward {
  static constexpr Text schema =
      "selective_scan_backward(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor grad_y, float dt_min, float "
      "dt_max, Tensor? D=None, Tensor? z=None, Tensor? dt_bias=None, Tensor? state=None, Tensor? "
      "grad_final_state=None, bool softplus=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor, Tensor, "
      "Tensor, Tensor, Tensor, Tensor, Tensor)";

  static SelectiveScanBackwardArgs args_of(auto& given) {
    SelectiveScanBackwardArgs args =
        selective_scan_backward_args({.forward = inputs_of_scan(given, contiguous_view<"state">(given)),
                                      .grad_y = dense_view<"grad_y">(given),
                                      .grad_final_state = contiguous_view<"grad_final_state">(given)});
    const SelectiveScanArgs& forward = args.forward;
    const auto like = [&](const TensorView& input) {
      const int64_t none[] = {0};
      return input ? contiguous_like(input, input.dtype) : contiguous_view(forward.x.device, forward.x.dtype, 1, none);
    };
    args.grad_x = like(forward.x), args.grad_dt = like(forward.dt), args.grad_a = like(forward.a);
    args.grad_b = like(forward.b), args.grad_c = like(forward.c), args.grad_d = like(forward.d);
    args.grad_z = like(forward.z), args.grad_dt_bias = like(forward.dt_bias);
    args.grad_state = like_states(forward);
    return args;
  }

  static std::array<Tensor, 9> run(Arguments<SelectiveScanBackward>& given) {
    SelectiveScanBackwardArgs args = args_of(given);
    const auto empty = [&](TensorView& view) { return Tensor::empty(given.op, view); };
    std::array<Tensor, 9> results{empty(args.grad_x), empty(args.grad_dt), empty(args.grad_a),
                                  empty(args.grad_b), empty(args.grad_c),  empty(args.grad_d),
                                  empty(args.grad_z), empty(args.grad_dt_bias), empty(args.grad_state)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp selective_scan_op = registered<SelectiveScan>();
const RegisteredOp selective_scan_in_place_op = registered<SelectiveScanInPlace>();
const RegisteredOp selective_scan_backward_op = registered<SelectiveScanBackward>();

}  // namespace lowbit::torch
