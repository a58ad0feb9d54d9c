// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {
namespace {

void linear_kernel(StableIValue* stack) {
  const Tensor x = Tensor::take(stack[0]), weight = Tensor::take(stack[1]);
  const Tensor bias = Tensor::take_optional(stack[8]), mul = Tensor::take_optional(stack[10]),
               add = Tensor::take_optional(stack[11]);
  const int64_t n = to_int(stack[2]), k = to_int(stack[3]), format = to_int(stack[4]), group_size = to_int(stack[5]);
  const int64_t x_format = to_int(stack[7]), activation = to_int(stack[9]);
  const bool asymmetric = to_bool(stack[6]);

  LinearTensors tensors{.x = x.view("linear", "x"),
                        .weight = weight.view("linear", "weight"),
                        .bias = bias.view("linear", "bias"),
                        .mul = mul.view("linear", "mul"),
                        .add = add.view("linear", "add"),
                        .y = {}};
  const TensorView& in = tensors.x;
  const WeightSpec spec = weight_spec("linear", n, k, format, group_size, asymmetric);
  auto shape = in.shape;
  if (in.rank) shape[in.rank - 1] = n;
  tensors.y = contiguous_view(in.device, in.dtype, in.rank, shape.data());

  LinearArgs args = linear_args(tensors, spec, x_format, activation);  // every check, before anything is allocated
  Tensor y = Tensor::empty("linear", tensors.y);
  args.y = tensors.y.data;
  if (args.m > 0) run(args);
  stack[0] = to_value(std::move(y));
}

}  // namespace

const Op linear_op = {
    "linear",
    "linear(Tensor x, Tensor weight, int n, int k, int format, int group_size, bool asymmetric, int x_format, "
    "Tensor? bias=None, int activation=0, Tensor? mul=None, Tensor? add=None) -> Tensor",
    boxed<linear_kernel>};

}  // namespace lowbit::torch
