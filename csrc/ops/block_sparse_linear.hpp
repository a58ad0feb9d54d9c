// SPDX-License-Identifier: Apache-2.0
// block_sparse_linear: y = x @ w.T + bias, where only some of the square blocks of w [n, k] are stored, in torch's BSR:
// block j, for crow_indices[i] <= j < crow_indices[i + 1], is at row i * size and column col_indices[j] * size of w.
// The other blocks are not multiplied: they add nothing even where x is inf or nan.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

inline constexpr int64_t kSmallestSparseBlock = 16;  // columns of a vector; sizes are multiples of it

struct BlockSparseLinearArgs {
  Place place{};
  TensorView x;             // [..., k] float32, bfloat16 or float16, contiguous
  TensorView values;        // [blocks, size, size], dtype of x, contiguous
  TensorView crow_indices;  // int32 [n / size + 1], contiguous: starts at 0, non-decreasing, ends at `blocks`
  TensorView col_indices;   // int32 [blocks], contiguous: 0 to k / size - 1. The caller checks the values
  TensorView bias;          // [n] of the three dtypes, contiguous; or none
  TensorView y{};           // [..., n], dtype of x, contiguous: written

  int64_t size() const { return values.size(1); }
  int64_t k() const { return x.size(-1); }
  int64_t n() const { return (crow_indices.size(0) - 1) * size(); }
  int64_t m() const { return k() ? x.numel() / k() : 0; }
};

// Checks all arguments but y.
LOWBIT_API BlockSparseLinearArgs block_sparse_linear_args(const BlockSparseLinearArgs& given);
LOWBIT_API Call describe(const BlockSparseLinearArgs& args);

}  // namespace lowbit
