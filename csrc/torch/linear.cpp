// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include "ops/preferred_row.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Linear {
  static constexpr Text schema =
      "linear(Tensor x, Tensor weight, int n, int k, int format, int group_size, bool asymmetric, int x_format, "
      "Tensor? bias=None, int activation=0, Tensor? mul=None, Tensor? add=None, int row=0) -> Tensor";

  static std::pair<LinearArgs, TensorView> args_of(auto& given) {  // with the result, which has no data yet
    LinearTensors tensors{.x = view<"x">(given),
                          .weight = view<"weight">(given),
                          .bias = view<"bias">(given),
                          .mul = view<"mul">(given),
                          .add = view<"add">(given),
                          .y = {}};
    const TensorView& in = tensors.x;
    const int64_t n = get<"n">(given);
    const WeightSpec spec = weight_spec(given.op, n, get<"k">(given), get<"format">(given), get<"group_size">(given),
                                        get<"asymmetric">(given));
    auto shape = in.shape;
    if (in.rank) shape[in.rank - 1] = n;
    tensors.y = contiguous_view(in.device, in.dtype, in.rank, shape.data());
    return {linear_args(tensors, spec, get<"x_format">(given), get<"activation">(given)), tensors.y};
  }

  static Tensor run(Arguments<Linear>& given) {
    auto [args, y] = args_of(given);
    Tensor result = Tensor::empty(given.op, y);
    args.y = y.data;
    if (args.m > 0) lowbit::run(args, get<"row">(given));
    return result;
  }
};

}  // namespace

const RegisteredOp linear_op = registered<Linear>();

}  // namespace lowbit::torch
