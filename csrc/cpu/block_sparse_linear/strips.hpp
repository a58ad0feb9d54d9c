// SPDX-License-Identifier: Apache-2.0
// block_sparse_linear: code shared by its rows. A task is a strip: a multiple of 16 rows of w within one row of blocks.
// Values are read in place.
#pragma once

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/loops.hpp"
#include "cpu/vector_io.hpp"
#include "ops/block_sparse_linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Strip {
  int64_t begin, end;   // range of blocks
  int64_t first, rows;  // rows of w, counted from the first row of a block; `rows` is at least 16
  int64_t column;       // first column of y
};

// The strips of a weight, of at most `most` rows.
struct Strips {
  const BlockSparseLinearArgs& args;
  RowTiles units;  // units of 16 rows of a block
  Strips(const BlockSparseLinearArgs& args, int64_t most) : args(args), units(args.size() / 16, most / 16) {}
  int64_t count() const { return args.n() / args.size() * units.count; }
  Strip at(int64_t number) const {
    const int64_t row = number / units.count, tile = number % units.count;
    const int32_t* begin = args.crow_indices.as<int32_t>() + row;
    const int64_t first = units.begin(tile) * 16;
    return {begin[0], begin[1], first, units.height(tile) * 16, row * args.size() + first};
  }
};

// The first column of x that a block is multiplied with, and the offset of its row `row` in `values`.
LOWBIT_INLINE int64_t column_of(const BlockSparseLinearArgs& args, int64_t block) {
  return args.col_indices.as<int32_t>()[block] * args.size();
}
LOWBIT_INLINE int64_t row_of(const BlockSparseLinearArgs& args, int64_t block, int64_t row) {
  return (block * args.size() + row) * args.size();
}

LOWBIT_INLINE int threads_for_blocks(const BlockSparseLinearArgs& args) {
  return threads_worth(args.m() * args.values.numel());
}

// Stores 16 columns of a row of y, with bias.
LOWBIT_INLINE void store_sums(const BlockSparseLinearArgs& args, int64_t row, int64_t column, f32x16 sums) {
  if (args.bias) sums = add(sums, load_as_float(args.bias.data, args.bias.dtype, column, 16));
  store_from_float(args.y.data, args.y.dtype, row * args.n() + column, 16, sums);
}

// The same for 16 columns x 16 rows, `count` of which exist in y: sums[column][row], with a column stride of `stride`.
LOWBIT_INLINE void store_transposed(const BlockSparseLinearArgs& args, int64_t row, int64_t count, int64_t column,
                                    const float* sums, int64_t stride) {
  alignas(64) float rows[16 * 16];
  transpose_16x16(sums, stride, rows, 16);
  for (int64_t r = 0; r < smaller(16, count); r++) store_sums(args, row + r, column, load(rows + r * 16));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
