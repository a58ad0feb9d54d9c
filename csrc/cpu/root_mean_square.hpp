// SPDX-License-Identifier: Apache-2.0
// 1 / sqrt(mean(x^2) + eps) of a row, for the ops that normalize.
#pragma once

#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Over n elements from `begin` on; the same result in every lane. Four accumulators: one would wait 4
// cycles per vector.
LOWBIT_INLINE f32x16 reciprocal_root_mean_square(const void* x, DType dtype, int64_t begin, int64_t n, double eps) {
  f32x16 squares[4] = {set1(0.0f), set1(0.0f), set1(0.0f), set1(0.0f)};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    for (int part = 0; part < 4; part++) {
      const f32x16 value = load_as_float(x, dtype, begin + i + 16 * part, 16);
      squares[part] = fma(value, value, squares[part]);
    }
  }
  for (; i < n; i += 16) {  // lanes past the end are 0
    const f32x16 value = load_as_float(x, dtype, begin + i, n - i);
    squares[0] = fma(value, value, squares[0]);
  }
  const float mean = sum(add(add(squares[0], squares[1]), add(squares[2], squares[3]))) / static_cast<float>(n);
  return div(set1(1.0f), sqrt(set1(mean + static_cast<float>(eps))));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
