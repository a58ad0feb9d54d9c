// SPDX-License-Identifier: Apache-2.0
#include "ops/linear_cross_entropy.hpp"

#include <array>

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct LinearCrossEntropy {
  static constexpr Text schema =
      "linear_cross_entropy(Tensor x, Tensor head, Tensor labels, int n, int k, int format, int group_size, "
      "bool asymmetric, int x_format, Tensor? bias=None, Tensor? row_weight=None, int ignore_index=-100, "
      "float scale=1., float softcap=0., float label_smoothing=0., float z_loss=0., bool grad_x=False, "
      "bool grad_head=False, bool grad_bias=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)";

  static LinearCrossEntropyArgs args_of(auto& given) {
    LinearCrossEntropyArgs args{.spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                                    get<"group_size">(given), get<"asymmetric">(given)),
                                .x = contiguous_view<"x">(given),
                                .head = contiguous_view<"head">(given),
                                .labels = contiguous_view<"labels">(given),
                                .bias = contiguous_view<"bias">(given),
                                .row_weight = contiguous_view<"row_weight">(given),
                                .ignore_index = get<"ignore_index">(given),
                                .scale = static_cast<float>(get<"scale">(given)),
                                .softcap = static_cast<float>(get<"softcap">(given)),
                                .smoothing = static_cast<float>(get<"label_smoothing">(given)),
                                .z_loss = static_cast<float>(get<"z_loss">(given)),
                                .of_x = get<"grad_x">(given),
                                .of_head = get<"grad_head">(given),
                                .of_bias = get<"grad_bias">(given)};
    args = linear_cross_entropy_args(args, get<"x_format">(given));
    const TensorView& x = args.x;
    const int64_t none[] = {0}, rows[] = {args.rows()};
    const TensorView empty = contiguous_view(x.device, DType::float32, 1, none);
    args.loss = args.lse = contiguous_view(x.device, DType::float32, 1, rows);
    args.grad_x = args.of_x ? contiguous_like(x, x.dtype) : empty;
    args.grad_head = args.of_head ? contiguous_like(args.head, args.head.dtype) : empty;
    args.grad_bias = args.of_bias ? contiguous_like(args.bias, args.bias.dtype) : empty;
    return args;
  }

  static std::array<Tensor, 5> run(Arguments<LinearCrossEntropy>& given) {
    LinearCrossEntropyArgs args = args_of(given);
    std::array<Tensor, 5> results{Tensor::empty(given.op, args.loss), Tensor::empty(given.op, args.lse),
                                  Tensor::empty(given.op, args.grad_x), Tensor::empty(given.op, args.grad_head),
                                  Tensor::empty(given.op, args.grad_bias)};
    lowbit::run(args);
    return results;
  }
};

}  // namespace

const RegisteredOp linear_cross_entropy_op = registered<LinearCrossEntropy>();

}  // namespace lowbit::torch
