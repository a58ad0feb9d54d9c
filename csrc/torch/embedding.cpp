// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"
#include "ops/quantize.hpp"
#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Embedding {
  static constexpr Text schema =
      "embedding(Tensor weight, Tensor indices, Tensor like, int n, int k, int format, int group_size, "
      "bool asymmetric, int layout) -> Tensor";

  static DequantizeArgs args_of(auto& given) {
    const WeightSpec spec = weight_spec(given.op, get<"n">(given), get<"k">(given), get<"format">(given),
                                        get<"group_size">(given), get<"asymmetric">(given));
    const TensorView indices = contiguous_view<"indices">(given);
    DequantizeArgs args = embedding_args(view<"weight">(given), indices, spec, get<"layout">(given),
                                        view<"like">(given).dtype);
    auto shape = indices.shape;
    shape[indices.rank] = spec.k;
    args.out = contiguous_view(indices.device, view<"like">(given).dtype, indices.rank + 1, shape.data());
    return args;
  }

  static Tensor run(Arguments<Embedding>& given) {
    DequantizeArgs args = args_of(given);
    Tensor y = Tensor::empty(given.op, args.out);
    embedding(args);
    return y;
  }
};

}  // namespace

const RegisteredOp embedding_op = registered<Embedding>();

}  // namespace lowbit::torch
