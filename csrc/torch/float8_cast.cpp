// SPDX-License-Identifier: Apache-2.0
#include "ops/float8_cast.hpp"

#include <array>

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Float8Cast {
  static constexpr Text schema =
      "float8_cast(Tensor x, bool e5m2, int dim, bool power_of_2, bool bfloat16) -> (Tensor, Tensor)";

  static Float8CastArgs args_of(auto& given) {
    Float8CastArgs args = float8_cast_args(contiguous_view<"x">(given), get<"e5m2">(given), get<"dim">(given),
                                           get<"power_of_2">(given));
    const int64_t shape[] = {args.scale_of == ScaleOf::row ? args.x.size(0) : 1,
                             args.scale_of == ScaleOf::column ? args.x.size(1) : 1};
    args.values = contiguous_like(args.x, get<"bfloat16">(given) ? DType::bfloat16 : DType::float32);
    args.divisor = contiguous_view(args.x.device, DType::float32, 2, shape);
    return args;
  }

  static std::array<Tensor, 2> run(Arguments<Float8Cast>& given) {
    Float8CastArgs args = args_of(given);
    std::array<Tensor, 2> results{Tensor::empty(given.op, args.values), Tensor::empty(given.op, args.divisor)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp float8_cast_op = registered<Float8Cast>();

}  // namespace lowbit::torch
