// SPDX-License-Identifier: Apache-2.0
#include "ops/block_sparse_linear.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

BlockSparseLinearArgs block_sparse_linear_args(const BlockSparseLinearArgs& given) {
  constexpr std::string_view op = "block_sparse_linear";
  BlockSparseLinearArgs args = given;
  args.place = place_of(op, {{"x", args.x}, {"values", args.values}, {"crow_indices", args.crow_indices},
                             {"col_indices", args.col_indices}, {"bias", args.bias}});
  check_activation(op, "x", args.x);
  check_contiguous(op, "x", args.x);
  check(args.values.rank == 3 && args.values.size(1) == args.values.size(2), value, op,
        ": values must have shape [blocks, size, size], got ", shape_text(args.values));
  const int64_t size = args.size();
  check(size >= kSmallestSparseBlock && size % kSmallestSparseBlock == 0, value, op,
        ": the size of a block must be a multiple of 16, got ", size);
  check_tensor(op, "values", args.values, args.x.dtype, {args.values.size(0), size, size});
  check(args.x.rank >= 1 && args.k() > 0 && args.k() % size == 0, value, op,
        ": x must have shape [..., k] with k a multiple of the blocks' size, ", size, ", got ", shape_text(args.x));
  check(args.crow_indices.rank == 1 && args.crow_indices.size(0) >= 1, value, op,
        ": crow_indices must have shape [n / size + 1], got ", shape_text(args.crow_indices));
  check_tensor(op, "crow_indices", args.crow_indices, DType::int32, {args.crow_indices.size(0)});
  check_tensor(op, "col_indices", args.col_indices, DType::int32, {args.values.size(0)});
  if (args.bias) {
    check_activation(op, "bias", args.bias);
    check_tensor(op, "bias", args.bias, args.bias.dtype, {args.n()});
  }
  return args;
}

Call describe(const BlockSparseLinearArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of(args.x) + bytes_of(args.values) + bytes_of(args.crow_indices) +
                      bytes_of(args.col_indices) + bytes_of(args.bias),
              .written = bytes_of(args.y),
              .operations = 2 * args.m() * args.values.numel()}
      .with(args.x, args.values, args.y);
}

}  // namespace lowbit
