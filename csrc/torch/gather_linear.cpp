// SPDX-License-Identifier: Apache-2.0
#include "ops/gather_linear.hpp"

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct GatherLinear : Returns<GatherLinear, &GatherLinearArgs::y> {
  static constexpr Text schema =
      "gather_linear(Tensor x, Tensor weight, Tensor index, int n, int k, int format, int group_size, bool asymmetric, "
      "int x_format, Tensor? bias=None) -> Tensor";

  static GatherLinearArgs args_of(auto& given) {
    GatherLinearArgs args{.weight_spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                                     get<"group_size">(given), get<"asymmetric">(given)),
                          .x = contiguous_view<"x">(given),
                          .weight = contiguous_view<"weight">(given),
                          .index = contiguous_view<"index">(given),
                          .bias = contiguous_view<"bias">(given)};
    args = gather_linear_args(args, get<"x_format">(given));
    const int64_t shape[] = {args.index.size(0), args.index.size(1), args.weight_spec.n};
    args.y = contiguous_view(args.x.device, args.x.dtype, 3, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp gather_linear_op = registered<GatherLinear>();

}  // namespace lowbit::torch
