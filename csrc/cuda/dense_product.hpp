// SPDX-License-Identifier: Apache-2.0
// A product of dense matrices, as libraries of a device make them for rows of linear.
#pragma once

#include "core/dtype.hpp"

namespace lowbit {

// y[m, n] = sum over k of x[m, k] * w[n, k]: of floats in float32, of int8 in int32. Rows of x and w follow each other.
struct DenseProduct {
  int64_t m, n, k;
  DType dtype;  // of x and w
  const void *x, *w;
  void* y;
  int64_t y_row;   // elements from row to row
  bool is_narrow;  // y is of dtype: float sums are rounded once
};

}  // namespace lowbit
