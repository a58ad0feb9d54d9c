// SPDX-License-Identifier: Apache-2.0
#include "ops/fake_quantize.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct FakeQuantize {
  static constexpr Text schema =
      "fake_quantize(Tensor weight, int format, int group_size, int mapping, Tensor? scale=None, Tensor? zero=None, "
      "bool codes=False) -> (Tensor, Tensor, Tensor)";

  static FakeQuantizeArgs args_of(auto& given) {
    FakeQuantizeArgs args = fake_quantize_args(contiguous_view<"weight">(given), get<"format">(given),
                                               get<"group_size">(given), get<"mapping">(given),
                                               contiguous_view<"scale">(given), contiguous_view<"zero">(given));
    const TensorView& weight = args.weight;
    const int64_t shape[] = {args.spec.n, args.spec.groups()};
    args.out = contiguous_like(weight, get<"codes">(given) ? DType::uint8 : weight.dtype);
    args.scale = args.zero = contiguous_view(weight.device, DType::float32, 2, shape);
    return args;
  }

  static std::array<Tensor, 3> run(Arguments<FakeQuantize>& given) {
    FakeQuantizeArgs args = args_of(given);
    std::array<Tensor, 3> results{Tensor::empty(given.op, args.out), Tensor::empty(given.op, args.scale),
                                  Tensor::empty(given.op, args.zero)};
    lowbit::run(args);
    return results;
  }
};

struct FakeQuantizeBackward {
  static constexpr Text schema =
      "fake_quantize_backward_(Tensor(a!) grad, Tensor weight, Tensor scale, Tensor zero, int format, int group_size, "
      "bool scale_wanted) -> Tensor";

  static FakeQuantizeBackwardArgs args_of(auto& given) {
    FakeQuantizeBackwardArgs args = fake_quantize_backward_args(
        written_view<"grad">(given), contiguous_view<"weight">(given), contiguous_view<"scale">(given),
        contiguous_view<"zero">(given), get<"format">(given), get<"group_size">(given));
    const int64_t shape[] = {get<"scale_wanted">(given) ? args.spec.n : 0, args.spec.groups()};
    args.grad_scale = contiguous_view(args.weight.device, DType::float32, 2, shape);
    return args;
  }

  static Tensor run(Arguments<FakeQuantizeBackward>& given) {
    FakeQuantizeBackwardArgs args = args_of(given);
    Tensor grad_scale = Tensor::empty(given.op, args.grad_scale);
    if (!get<"scale_wanted">(given)) args.grad_scale = {};
    lowbit::run(args);
    return grad_scale;
  }
};

struct FakeQuantizeActivations : Returns<FakeQuantizeActivations, &FakeQuantizeActivationsArgs::out> {
  static constexpr Text schema = "fake_quantize_activations(Tensor x, int x_format, int group_size) -> Tensor";

  static FakeQuantizeActivationsArgs args_of(auto& given) {
    FakeQuantizeActivationsArgs args = fake_quantize_activations_args(
        contiguous_view<"x">(given), get<"x_format">(given), get<"group_size">(given));
    args.out = contiguous_like(args.x, args.x.dtype);
    return args;
  }
};

}  // namespace

const RegisteredOp fake_quantize_op = registered<FakeQuantize>();
const RegisteredOp fake_quantize_backward_op = registered<FakeQuantizeBackward>();
const RegisteredOp fake_quantize_activations_op = registered<FakeQuantizeActivations>();

}  // namespace lowbit::torch
