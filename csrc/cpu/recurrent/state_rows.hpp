// SPDX-License-Identifier: Apache-2.0
// Rows of a tensor as rows of a float32 matrix; or as its columns, as states whose rows are stepped side by side.
#pragma once

#include "cpu/tile_products.hpp"
#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE void load_row(const TensorView& from, int64_t at, int64_t columns, float* to) {
  for (int64_t i = 0; i < columns; i += 16) store(to + i, load_as_float(from.data, from.dtype, at + i, columns - i));
}

// to = from^T, a part [rows, columns] of a tensor from `at` on with rows of the length `columns`; zeros if there is
// none. Both sizes are rounded up to 16.
void load_turned(const TensorView& from, int64_t at, int64_t rows, int64_t columns, Matrix<float> to) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < columns; c += 16) {
      alignas(64) float block[16 * 16] = {};
      for (int64_t i = 0; from && i < smaller(16, rows - r); i++)
        store(block + i * 16, load_as_float(from.data, from.dtype, at + (r + i) * columns + c, columns - c));
      transpose_16x16(block, 16, to.row(c) + r, to.stride);
    }
}

// The way back.
void store_turned(Matrix<float> from, int64_t rows, int64_t columns, const TensorView& to, int64_t at) {
  for (int64_t r = 0; r < rows; r += 16)
    for (int64_t c = 0; c < columns; c += 16) {
      alignas(64) float block[16 * 16];
      transpose_16x16(from.row(c) + r, from.stride, block, 16);
      for (int64_t i = 0; i < smaller(16, rows - r); i++)
        store_from_float(to.data, to.dtype, at + (r + i) * columns + c, columns - c, load(block + i * 16));
    }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
