// SPDX-License-Identifier: Apache-2.0
// Rows of strided tensors. In an unnamed namespace, since kernels of several instruction sets include it.
#pragma once

#include "core/tensor_view.hpp"

namespace lowbit::cpu {
namespace {

// Where a row of the last dimension begins.
inline int64_t begin_of_row(const TensorView& tensor, int64_t row) {
  int64_t at = 0;
  for (int dim = tensor.rank - 2; dim >= 0; row /= tensor.size(dim), dim--)
    at += row % tensor.size(dim) * tensor.stride[dim];
  return at;
}

}  // namespace
}  // namespace lowbit::cpu
