// SPDX-License-Identifier: Apache-2.0
#include "ops/experts.hpp"

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

// (n, k, format, group_size, asymmetric, x_format) of one expert, in the order of Python's LinearArgs.
struct ProductNumbers {
  WeightSpec spec;
  int64_t x_format;
};

ProductNumbers numbers(std::string_view op, std::string_view name, const std::vector<int64_t>& of) {
  lowbit::check(of.size() == 6, ErrorKind::value, op, ": ", name,
                " must be (n, k, format, group_size, asymmetric, x_format), got ", of.size(), " numbers");
  return {weight_spec(op, of[0], of[1], of[2], of[3], of[4] != 0), of[5]};
}

struct Experts : Returns<Experts, &ExpertsArgs::y> {
  static constexpr Text schema =
      "experts(Tensor x, Tensor gate_up, Tensor down, Tensor index, Tensor weights, int[] gate_up_args, "
      "int[] down_args, int activation, bool gated=True, bool interleaved=False, float alpha=1., float limit=0., "
      "float up_offset=0., Tensor? gate_up_bias=None, Tensor? down_bias=None) -> Tensor";

  static ExpertsArgs args_of(auto& given) {
    const auto gate_up = numbers(given.op, "gate_up_args", integers<"gate_up_args">(given)),
               down = numbers(given.op, "down_args", integers<"down_args">(given));
    ExpertsArgs args{.x = contiguous_view<"x">(given),
                     .gate_up = {.spec = gate_up.spec,
                                 .packed = contiguous_view<"gate_up">(given),
                                 .bias = contiguous_view<"gate_up_bias">(given)},
                     .down = {.spec = down.spec,
                              .packed = contiguous_view<"down">(given),
                              .bias = contiguous_view<"down_bias">(given)},
                     .index = contiguous_view<"index">(given),
                     .weights = contiguous_view<"weights">(given),
                     .gate = {.gated = get<"gated">(given),
                              .interleaved = get<"interleaved">(given),
                              .alpha = static_cast<float>(get<"alpha">(given)),
                              .limit = static_cast<float>(get<"limit">(given)),
                              .up_offset = static_cast<float>(get<"up_offset">(given))}};
    args = experts_args(args, gate_up.x_format, down.x_format, get<"activation">(given));
    const int64_t shape[] = {args.tokens(), args.down.spec.n};
    args.y = contiguous_view(args.x.device, args.x.dtype, 2, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp experts_op = registered<Experts>();

}  // namespace lowbit::torch
