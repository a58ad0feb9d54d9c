// SPDX-License-Identifier: Apache-2.0
#include "ops/block_sparse_linear.hpp"

#include "torch/arguments.hpp"

namespace lowbit::torch {
namespace {

struct BlockSparseLinear : Returns<BlockSparseLinear, &BlockSparseLinearArgs::y> {
  static constexpr Text schema =
      "block_sparse_linear(Tensor x, Tensor values, Tensor crow_indices, Tensor col_indices, Tensor? bias=None) "
      "-> Tensor";

  static BlockSparseLinearArgs args_of(auto& given) {
    BlockSparseLinearArgs args = block_sparse_linear_args({.x = contiguous_view<"x">(given),
                                                           .values = contiguous_view<"values">(given),
                                                           .crow_indices = contiguous_view<"crow_indices">(given),
                                                           .col_indices = contiguous_view<"col_indices">(given),
                                                           .bias = contiguous_view<"bias">(given)});
    auto shape = args.x.shape;
    shape[args.x.rank - 1] = args.n();
    args.y = contiguous_view(args.x.device, args.x.dtype, args.x.rank, shape.data());
    return args;
  }
};

}  // namespace

const RegisteredOp block_sparse_linear_op = registered<BlockSparseLinear>();

}  // namespace lowbit::torch
