// SPDX-License-Identifier: Apache-2.0
#include "ops/int8_pack.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct Int8Pack : Returns<Int8Pack, &Int8PackArgs::packed> {
  static constexpr Text schema = "int8_pack(Tensor weight) -> Tensor";

  static Int8PackArgs args_of(auto& given) {
    TensorView weight = view<"weight">(given);
    if (!in_columns(weight)) weight = contiguous_view<"weight">(given);
    Int8PackArgs args = int8_pack_args(weight);
    const int64_t shape[] = {args.spec.panels(), args.spec.panel_bytes()};
    args.packed = contiguous_view(args.weight.device, DType::uint8, 2, shape);
    return args;
  }
};

}  // namespace

const RegisteredOp int8_pack_op = registered<Int8Pack>();

}  // namespace lowbit::torch
