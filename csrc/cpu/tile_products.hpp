// SPDX-License-Identifier: Apache-2.0
// Products of two float matrices that are tiles of larger ones, and so in L2: activations by activations. Both are in
// float32 or float64, whatever the tensors' dtype.
//
//   multiply(a, b, c, {rows, columns, depth})              c = a b
//   multiply(transposed(a), b, c, {rows, columns, depth})  c = a^T b, in the same time
//   multiply(a, b, c, size, {.sum = Sum::onto})            c += a b
//   solve_lower(a, x, rows, columns)                       x = (I - a)^-1 x, for the part of a below its diagonal
//
// An element of a is broadcast, so a may have any strides; b and c are row-major, with their columns in vectors of 16.
// A product a b^T takes a transposed copy of b (transpose_16x16). An element of c is accumulated along the depth in
// order: its bits depend on its row of a and its column of b alone, not on the size or the options of a product.
// Include after a header of cpu/simd/.
#pragma once

#include "core/arena.hpp"
#include "core/one_function.hpp"
#include "cpu/loops.hpp"
#include "cpu/simd/double.hpp"
#include "cpu/upcoming.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A stride of 16 * odd elements: consecutive rows fall into different sets of L1.
LOWBIT_INLINE constexpr int64_t row_stride(int64_t columns) { return (ceil_div(columns, 16) | 1) * 16; }

// Row-major. Every row has memory up to the next multiple of 16 columns.
template <class T>
struct Matrix {
  T* data = nullptr;
  int64_t stride = 0;  // row stride, a multiple of 16
  LOWBIT_INLINE T* row(int64_t r) const { return data + r * stride; }
  LOWBIT_INLINE Matrix from(int64_t r) const { return {row(r), stride}; }
};

template <class T>
void clear_rows(Matrix<T> m, int64_t rows) {
  for (int64_t i = 0; i < rows * m.stride; i += 16) store(m.data + i, set1(T{0}));
}

// An arena that allocates matrices too.
struct TileArena : Arena {
  template <class T>
  LOWBIT_INLINE Matrix<T> matrix(int64_t rows, int64_t columns) {
    return {array<T>(rows * row_stride(columns)), row_stride(columns)};
  }
};

// The left factor of a product: element (r, i) is at data[r * row + i * step]. A Matrix converts to one.
template <class T>
struct LeftFactor {
  const T* data;
  int64_t row, step;
  LOWBIT_INLINE LeftFactor(const T* data, int64_t row, int64_t step) : data(data), row(row), step(step) {}
  LOWBIT_INLINE LeftFactor(Matrix<T> m) : LeftFactor(m.data, m.stride, 1) {}
  LOWBIT_INLINE LeftFactor from(int64_t r, int64_t i) const { return {data + r * row + i * step, row, step}; }
};
template <class T>
LOWBIT_INLINE LeftFactor<T> transposed(Matrix<T> m) { return {m.data, 1, m.stride}; }

struct ProductSize {
  int64_t rows, columns, depth;  // size of c; depth: columns of a, rows of b
};

enum class Sum { fresh, onto };  // c = a b, or c += a b

// If only part of a product is needed, as in a triangle, its rows are cut into these tiles, with a span for each.
LOWBIT_INLINE RowTiles product_tiles(int64_t rows) { return {rows, kFloatRows}; }

struct ProductOptions {
  Sum sum = Sum::fresh;
  // Per row tile (product_tiles): the columns needed, in multiples of 16, all others being optional; or the part of
  // the depth to sum over, with arbitrary ends. Null: all.
  const Span *columns = nullptr, *depth = nullptr;
  Upcoming* ahead[2] = {};  // prefetched along with each tile
};

// Rows to prefetch in the course of a product of that size.
LOWBIT_INLINE Upcoming fetched_by(MemoryRows rows, int64_t product_rows, int64_t product_columns) {
  return {rows, ceil_div(rows.count,
                         larger(1, ceil_div(product_rows, kFloatRows) * ceil_div(product_columns, 16 * kFloatPanels)))};
}

template <class T, int kRows, int kVectors>
LOWBIT_INLINE void multiply_tile(LeftFactor<T> a, const T* b, int64_t b_stride, int64_t depth, T* c, int64_t c_stride,
                                 Sum sum) {
  using Vector = decltype(load(c));
  Vector acc[kRows][kVectors];
  unroll<kRows>([&](auto r) {
    unroll<kVectors>([&](auto v) { acc[r][v] = sum == Sum::fresh ? set1(T{0}) : load(c + r * c_stride + v * 16); });
  });
  if (sum == Sum::onto)  // prefetches the next rows of c: with 4096 keys, gradients of k and v come from L3, and no
                         // stream shows the hardware what comes next
    unroll<kRows>(
        [&](auto r) { unroll<kVectors>([&](auto v) { __builtin_prefetch(c + (kRows + r) * c_stride + v * 16, 1); }); });
  for (int64_t i = 0; i < depth; i++, b += b_stride) {
    Vector w[kVectors];
    unroll<kVectors>([&](auto v) { w[v] = load(b + v * 16); });
    unroll<kRows>([&](auto r) {
      const Vector x = set1(a.data[r * a.row + i * a.step]);
      unroll<kVectors>([&](auto v) { acc[r][v] = fma(x, w[v], acc[r][v]); });
    });
  }
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto v) { store(c + r * c_stride + v * 16, acc[r][v]); }); });
}

// Columns are rounded up to 16. A block of rows of a, and the strip of b with 16 or 32 columns, stay in L1. One
// function for both kinds of left factor: gcc's clones for a row or step of 1 doubled the code and were no faster.
template <class T>
LOWBIT_ONE_FUNCTION void multiply(std::type_identity_t<LeftFactor<T>> a, Matrix<T> b, Matrix<T> c,
                                  const ProductSize& size, const ProductOptions& options = {}) {
  const RowTiles tiles = product_tiles(size.rows);
  constexpr int64_t kMaxTiles = 16;
  const int64_t tile_bytes = larger(1, size.depth) * static_cast<int64_t>(sizeof(T)) * kFloatRows;
  const int64_t block = smaller(kMaxTiles, larger(1, kL1Block / tile_bytes));
  for (int64_t first = 0; first < tiles.count; first += block) {
    const int64_t last = smaller(tiles.count, first + block);
    int64_t begin[kMaxTiles + 1];  // computed once, as each is a division
    for (int64_t tile = first; tile <= last; tile++) begin[tile - first] = tiles.begin(tile);
    for (int64_t j = 0; j < size.columns; j += 16 * kFloatPanels) {
      const int vectors = static_cast<int>(smaller(kFloatPanels, ceil_div(size.columns - j, 16)));
      for (int64_t tile = first; tile < last; tile++) {
        if (options.columns && (j + 16 * vectors <= options.columns[tile].begin || j >= options.columns[tile].end))
          continue;
        const int64_t r = begin[tile - first];
        const Span along = options.depth ? options.depth[tile] : Span{0, size.depth};
        const int64_t length = smaller(along.end, size.depth) - along.begin;
        if (length <= 0 && options.sum == Sum::onto) continue;
        for (Upcoming* rows : options.ahead)
          if (rows) rows->fetch();
        with_count<kFloatRows>(static_cast<int>(begin[tile - first + 1] - r), [&](auto kRows) {
          with_count<kFloatPanels>(vectors, [&](auto kVectors) {
            multiply_tile<T, kRows, kVectors>(a.from(r, along.begin), b.row(along.begin) + j, b.stride, length,
                                              c.row(r) + j, c.stride, options.sum);
          });
        });
      }
    }
  }
}

// x = b + a x for the b in x, a [rows, rows]: reads only the part below the diagonal. Chunks of the delta rule solve
// this, where a token corrects what earlier tokens of its chunk have written.
template <class T>
void solve_lower(Matrix<T> a, Matrix<T> x, int64_t rows, int64_t columns) {
  const RowTiles tiles = product_tiles(rows);
  for (int64_t tile = 0; tile < tiles.count; tile++) {
    const int64_t first = tiles.begin(tile), last = tiles.begin(tile + 1);
    multiply(a.from(first), x, x.from(first), {last - first, columns, first}, {.sum = Sum::onto});
    for (int64_t j = 0; j < columns; j += 16)
      for (int64_t r = first + 1; r < last; r++) {
        auto sum = load(x.row(r) + j);
        for (int64_t i = first; i < r; i++) sum = fma(set1(a.row(r)[i]), load(x.row(i) + j), sum);
        store(x.row(r) + j, sum);
      }
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
