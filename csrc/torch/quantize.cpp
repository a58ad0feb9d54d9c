// SPDX-License-Identifier: Apache-2.0
#include "ops/quantize.hpp"

#include "ops/linear.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Dequantize {
  static constexpr Text schema =
      "dequantize(Tensor weight, int n, int k, int format, int group_size, bool asymmetric) -> Tensor";

  template <class Given>
  static DequantizeArgs args_of(Given& given) {
    const WeightSpec spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                        get<"group_size">(given), get<"asymmetric">(given));
    const TensorView packed = view<"weight">(given);
    check_weight(given.op, packed, spec);
    const int64_t shape[] = {spec.n, spec.k};
    return {.spec = spec, .packed = packed, .out = contiguous_view(packed.device, DType::float32, 2, shape)};
  }

  static Tensor run(Arguments<Dequantize>& given) {
    DequantizeArgs args = args_of(given);
    Tensor result = Tensor::empty(given.op, args.out);
    dequantize(args.packed, args.spec, args.out);
    return result;
  }
};

}  // namespace

const RegisteredOp dequantize_op = registered<Dequantize>();

}  // namespace lowbit::torch
