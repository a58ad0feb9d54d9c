// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

TensorView like_states(const SsdArgs& args) {
  const int64_t shape[] = {args.sequences(), args.heads(), args.p(), args.s()};
  return contiguous_view(args.x.device, args.state_dtype(), 4, shape);
}

SsdArgs inputs_of(auto& given, const TensorView& state) {
  return {.x = dense_view<"x">(given),
          .dt = dense_view<"dt">(given),
          .a = contiguous_view<"A">(given),
          .b = dense_view<"B">(given),
          .c = dense_view<"C">(given),
          .d = contiguous_view<"D">(given),
          .dt_bias = contiguous_view<"dt_bias">(given),
          .state = state,
          .softplus = get<"softplus">(given),
          .dt_min = get<"dt_min">(given),
          .dt_max = get<"dt_max">(given),
          .cu_seqlens = contiguous_view<"cu_seqlens">(given)};
}

struct Ssd {
  static constexpr Text schema =
      "ssd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, float dt_min, float dt_max, Tensor? D=None, Tensor? "
      "dt_bias=None, Tensor? state=None, bool softplus=False, Tensor? cu_seqlens=None) -> (Tensor, Tensor)";

  static SsdArgs args_of(auto& given) {
    SsdArgs args = ssd_args(inputs_of(given, contiguous_view<"state">(given)));
    args.y = contiguous_like(args.x, args.x.dtype);
    args.final_state = like_states(args);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<Ssd>& given) {
    SsdArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.y), Tensor::empty(given.op, args.final_state)};
    lowbit::run(args);
    return results;
  }
};

// The same, with the new state in the place of the old one.
struct SsdInPlace : Returns<SsdInPlace, &SsdArgs::y, &SsdArgs::state> {
  static constexpr Text schema =
      "ssd_(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor(a!) state, float dt_min, float dt_max, Tensor? "
      "D=None, Tensor? dt_bias=None, bool softplus=False, Tensor? cu_seqlens=None) -> Tensor";

  static SsdArgs args_of(auto& given) {
    SsdArgs args = ssd_args(inputs_of(given, written_view<"state">(given)));
    args.y = contiguous_like(args.x, args.x.dtype);
    args.final_state = args.state;
    return args;
  }
};

struct SsdBackward {
  static constexpr Text schema =
      "ssd_backward(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor grad_y, float dt_min, float dt_max, "
      "Tensor? D=None, Tensor? dt_bias=None, Tensor? state=None, Tensor? grad_final_state=None, bool softplus=False, "
      "Tensor? cu_seqlens=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)";

  static SsdBackwardArgs args_of(auto& given) {
    SsdBackwardArgs args =
        ssd_backward_args({.forward = inputs_of(given, contiguous_view<"state">(given)),
                           .grad_y = dense_view<"grad_y">(given),
                           .grad_final_state = contiguous_view<"grad_final_state">(given)});
    const SsdArgs& forward = args.forward;
    const auto like = [](const TensorView& input) { return contiguous_like(input, input.dtype); };
    args.grad_x = like(forward.x), args.grad_dt = like(forward.dt), args.grad_a = like(forward.a);
    args.grad_b = like(forward.b), args.grad_c = like(forward.c);
    args.grad_d = like(forward.d ? forward.d : forward.a);
    args.grad_dt_bias = like(forward.dt_bias ? forward.dt_bias : forward.a);
    args.grad_state = like_states(forward);
    return args;
  }

  static std::array<Tensor, 8> run(Arguments<SsdBackward>& given) {
    SsdBackwardArgs args = args_of(given);
    const auto empty = [&](TensorView& view) { return Tensor::empty(given.op, view); };
    std::array<Tensor, 8> results{empty(args.grad_x),       empty(args.grad_dt),   empty(args.grad_a),
                                  empty(args.grad_b),       empty(args.grad_c),    empty(args.grad_d),
                                  empty(args.grad_dt_bias), empty(args.grad_state)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp ssd_op = registered<Ssd>();
const RegisteredOp ssd_in_place_op = registered<SsdInPlace>();
const RegisteredOp ssd_backward_op = registered<SsdBackward>();

}  // namespace lowbit::torch
