// SPDX-License-Identifier: Apache-2.0
// A dense matrix product, as device libraries compute it for rows of linear.
#pragma once

#include "core/dtype.hpp"

namespace lowbit {

// y[m, n] = sum over k of x[m, k] * w[n, k]: floats accumulate in float32, int8 in int32. Rows of x and
// w are contiguous.
struct DenseProduct {
  int64_t m, n, k;
  DType dtype;  // dtype of x and w
  const void *x, *w;
  void* y;
  int64_t y_row;   // elements from row to row
  bool is_narrow;  // y has `dtype`: float accumulators are rounded once
};

}  // namespace lowbit
