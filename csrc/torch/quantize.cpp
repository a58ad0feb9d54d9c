// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "ops/linear.hpp"
#include "torch/boxed.hpp"
#include "torch/ops.hpp"

namespace lowbit::torch {
namespace {

void dequantize_kernel(StableIValue* stack) {
  const Tensor weight = Tensor::take(stack[0]);
  const WeightSpec spec = weight_spec("dequantize", to_int(stack[1]), to_int(stack[2]), to_int(stack[3]),
                                      to_int(stack[4]), to_bool(stack[5]));
  const TensorView packed = weight.view("dequantize", "weight");
  check_weight("dequantize", packed, spec);  // before n * k floats are allocated
  const int64_t shape[] = {spec.n, spec.k};
  TensorView out = contiguous_view(packed.device, DType::float32, 2, shape);
  Tensor result = Tensor::empty("dequantize", out);
  dequantize(packed, spec, out);
  stack[0] = to_value(std::move(result));
}

}  // namespace

const Op dequantize_op = {
    "dequantize", "dequantize(Tensor weight, int n, int k, int format, int group_size, bool asymmetric) -> Tensor",
    boxed<dequantize_kernel>};

}  // namespace lowbit::torch
