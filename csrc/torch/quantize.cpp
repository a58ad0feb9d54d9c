// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Dequantize : Returns<Dequantize, &DequantizeArgs::out> {
  static constexpr Text schema =
      "dequantize(Tensor weight, int n, int k, int format, int group_size, bool asymmetric, Tensor? like=None) "
      "-> Tensor";

  static DequantizeArgs args_of(auto& given) {
    const WeightSpec spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                        get<"group_size">(given), get<"asymmetric">(given));
    const TensorView like = view<"like">(given);
    const DType dtype = like ? like.dtype : DType::float32;
    DequantizeArgs args = dequantize_args(view<"weight">(given), spec, dtype);
    const int64_t shape[] = {spec.n, spec.k};
    args.out = contiguous_view(args.packed.device, dtype, 2, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp dequantize_op = registered<Dequantize>();

}  // namespace lowbit::torch
