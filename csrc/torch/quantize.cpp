// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Dequantize {
  static constexpr Text schema =
      "dequantize(Tensor weight, int n, int k, int format, int group_size, bool asymmetric) -> Tensor";

  static Tensor run(Arguments<Dequantize>& given) {
    const WeightSpec spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                        get<"group_size">(given), get<"asymmetric">(given));
    const TensorView packed = view<"weight">(given);
    check_weight(given.op, packed, spec);  // before n * k floats are allocated
    const int64_t shape[] = {spec.n, spec.k};
    TensorView out = contiguous_view(packed.device, DType::float32, 2, shape);
    Tensor result = Tensor::empty(given.op, out);
    dequantize(packed, spec, out);
    return result;
  }
};

}  // namespace

const RegisteredOp dequantize_op = registered<Dequantize>();

}  // namespace lowbit::torch
