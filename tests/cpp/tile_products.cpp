// SPDX-License-Identifier: Apache-2.0
// The products of cpu/tile_products.hpp on one instruction set against sums of float64. Started by
// tests/cpp/test_tile_products.py, which says the instruction set.
#include LOWBIT_ISA_HEADER

#include "cpu/tile_products.hpp"

#include <cmath>
#include <cstdio>
#include <limits>
#include <random>
#include <string>
#include <vector>

using namespace lowbit;
using namespace lowbit::cpu::LOWBIT_ISA_NAME;

constexpr int64_t kBehind = 2;  // rows and vectors of c that no product may touch

void fail(const std::string& what) {
  std::printf("%s\n", what.c_str());
  std::exit(1);
}

template <class T>
struct Case {
  ProductSize size;
  bool transposed_left;
  ProductOptions options;
  std::vector<T> a, b, c;
  LeftFactor<T> left{nullptr, 0, 0};
  Matrix<T> right, before, product;
  std::vector<T> before_memory;

  // Strides that no tile has: of a odd, of b and c some vectors more than the columns take. Columns of b behind its
  // last are nan: no wanted sum may have them.
  Case(ProductSize size, bool transposed_left, ProductOptions options, std::mt19937& random)
      : size(size), transposed_left(transposed_left), options(options) {
    std::normal_distribution<T> normal;
    const auto [rows, columns, depth] = size;
    const int64_t stride = round_up(columns, 16) + 16 * kBehind, a_stride = (transposed_left ? rows : depth) + 3 | 1;
    a.resize(a_stride * (transposed_left ? depth : rows)), b.resize(stride * larger(1, depth));
    c.resize(stride * (rows + kBehind));
    for (auto* values : {&a, &b, &c})
      for (T& x : *values) x = normal(random);
    for (int64_t i = 0; i < depth; i++)
      for (int64_t j = columns; j < stride; j++) b[i * stride + j] = std::numeric_limits<T>::quiet_NaN();
    before_memory = c;
    left = transposed_left ? LeftFactor<T>(a.data(), 1, a_stride) : LeftFactor<T>(a.data(), a_stride, 1);
    right = {b.data(), stride}, product = {c.data(), stride}, before = {before_memory.data(), stride};
  }
  Case(const Case&) = delete;

  std::string text() const {
    return "rows=" + std::to_string(size.rows) + " columns=" + std::to_string(size.columns) +
           " depth=" + std::to_string(size.depth) + " transposed=" + std::to_string(transposed_left) +
           " onto=" + std::to_string(options.sum == Sum::onto) +
           " spans=" + std::to_string(options.columns != nullptr) + std::to_string(options.depth != nullptr) +
           " bytes=" + std::to_string(sizeof(T)) + ": ";
  }
  double error_budget(double magnitude) const {
    return static_cast<double>(std::numeric_limits<T>::epsilon()) * static_cast<double>(size.depth + 1) * magnitude;
  }

  void check_element(int64_t r, int64_t j, Span along) const {
    const bool onto = options.sum == Sum::onto;
    double sum = onto ? static_cast<double>(before.row(r)[j]) : 0, magnitude = std::fabs(sum);
    for (int64_t i = along.begin; i < smaller(along.end, size.depth); i++) {
      const double term = static_cast<double>(left.data[r * left.row + i * left.step]) *
                          static_cast<double>(right.row(i)[j]);
      sum += term, magnitude += std::fabs(term);
    }
    const double got = static_cast<double>(product.row(r)[j]);
    if (!(std::fabs(got - sum) <= error_budget(magnitude)))
      fail(text() + "c[" + std::to_string(r) + "][" + std::to_string(j) + "] is " + std::to_string(got) + ", not " +
           std::to_string(sum));
  }

  void check() const {
    const RowTiles tiles = product_tiles(size.rows);
    for (int64_t tile = 0; tile < tiles.count; tile++) {
      const Span wanted = options.columns ? options.columns[tile] : Span{0, size.columns};
      const Span along = options.depth ? options.depth[tile] : Span{0, size.depth};
      for (int64_t r = tiles.begin(tile); r < tiles.begin(tile + 1); r++)
        for (int64_t j = wanted.begin; j < smaller(wanted.end, size.columns); j++) check_element(r, j, along);
    }
    check_surroundings();
  }
  void check_surroundings() const {
    const int64_t end = round_up(size.columns, 16);
    for (int64_t r = 0; r < size.rows + kBehind; r++)
      for (int64_t j = r < size.rows ? end : 0; j < product.stride; j++)
        if (product.row(r)[j] != before.row(r)[j]) fail(text() + "memory behind the product was written");
  }

  // Every element alone has the bits that it has among the others.
  void check_bits() {
    alignas(64) T one[16];
    for (int64_t r = 0; r < size.rows; r += 3)
      for (int64_t j = 0; j < size.columns; j += 16) {
        for (int64_t i = 0; i < 16; i++) one[i] = before.row(r)[j + i];
        const Matrix<T> strip{right.data + j, right.stride};
        multiply(left.from(r, 0), strip, Matrix<T>{one, 16}, {1, 16, size.depth}, {.sum = options.sum});
        for (int64_t i = 0; i < smaller(16, size.columns - j); i++)
          if (one[i] != product.row(r)[j + i]) fail(text() + "a row has other bits alone");
      }
  }
};

template <class T>
void check_whole(ProductSize size, bool transposed_left, Sum sum, std::mt19937& random) {
  Case<T> whole(size, transposed_left, {.sum = sum}, random);
  multiply(whole.left, whole.right, whole.product, size, whole.options);
  whole.check(), whole.check_bits();
}

// A lower triangle of c, and a product with one; each a little wider than its diagonal, as the spans of a tile are.
template <class T>
void check_spans(ProductSize size, bool transposed_left, Sum sum, std::mt19937& random) {
  const RowTiles tiles = product_tiles(size.rows);
  std::vector<Span> columns(tiles.count), depth(tiles.count);
  for (int64_t tile = 0; tile < tiles.count; tile++) {
    const int64_t end = tiles.begin(tile + 1), first = tile % 3 ? tiles.begin(tile) / 2 : 0;
    columns[tile] = {first / 16 * 16, round_up(smaller(end, size.columns), 16)};
    depth[tile] = {smaller(first, size.depth), end};
    if (tile % 5 == 4) columns[tile] = {16, 16}, depth[tile] = {3, 3};  // nothing
  }
  for (const ProductOptions& options : {ProductOptions{.sum = sum, .columns = columns.data()},
                                        ProductOptions{.sum = sum, .depth = depth.data()}}) {
    Case<T> part(size, transposed_left, options, random);
    multiply(part.left, part.right, part.product, size, options);
    part.check();
  }
}

// Matrices of an arena, as kernels have them; rows that are fetched meanwhile.
template <class T>
void check_matrices(std::mt19937& random) {
  constexpr int64_t kRows = 37, kColumns = 50, kDepth = 21;
  std::vector<char> memory(1 << 20);
  TileArena arena;
  arena.base = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(memory.data()), 64));
  const Matrix<T> a = arena.matrix<T>(kRows, kDepth), a_t = arena.matrix<T>(kDepth, kRows),
                  b = arena.matrix<T>(kDepth, kColumns), c = arena.matrix<T>(kRows, kColumns),
                  d = arena.matrix<T>(kRows, kColumns);
  if (a.stride != 48 || b.stride != 80) fail("rows of a matrix are not an odd number of vectors apart");
  std::normal_distribution<T> normal;
  clear_rows(b, kDepth);
  for (int64_t i = 0; i < kDepth * b.stride; i++)
    if (b.data[i] != 0) fail("clear_rows left something");
  for (int64_t i = 0; i < kDepth; i++) {
    for (int64_t r = 0; r < kRows; r++) a.row(r)[i] = a_t.row(i)[r] = normal(random);
    for (int64_t j = 0; j < kColumns; j++) b.row(i)[j] = normal(random);
  }
  const cpu::MemoryRows rows{memory.data(), 100, 200, 256};
  Upcoming ahead[] = {fetched_by(rows, kRows, kColumns), fetched_by({}, kRows, kColumns)};
  multiply(a, b, c, {kRows, kColumns, kDepth}, {.ahead = {&ahead[0], &ahead[1]}});
  if (ahead[0].rows.count != 0 || ahead[1].rows.count != 0) fail("rows were left that the product should have fetched");
  multiply(transposed(a_t), b, d, {kRows, kColumns, kDepth});
  for (int64_t r = 0; r < kRows; r++)
    for (int64_t j = 0; j < kColumns; j++) {
      double sum = 0, magnitude = 0;
      for (int64_t i = 0; i < kDepth; i++) {
        const double term = static_cast<double>(a.row(r)[i]) * static_cast<double>(b.row(i)[j]);
        sum += term, magnitude += std::fabs(term);
      }
      const double budget = static_cast<double>(std::numeric_limits<T>::epsilon()) * (kDepth + 1) * magnitude;
      if (!(std::fabs(static_cast<double>(c.row(r)[j]) - sum) <= budget)) fail("c = a b is wrong");
      if (c.row(r)[j] != d.row(r)[j]) fail("c = a^T b has other bits than c = a b");
    }
}

// x = b + a x, every element to the error of its own sum; what a has on and above its diagonal is not read.
template <class T>
void check_solve(int64_t rows, int64_t columns, std::mt19937& random) {
  Case<T> of({rows, columns, rows}, false, {.sum = Sum::onto}, random);
  std::vector<T> triangle(rows * row_stride(rows), std::numeric_limits<T>::quiet_NaN());
  const Matrix<T> a{triangle.data(), row_stride(rows)};
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < r; i++) a.row(r)[i] = of.left.data[r * of.left.row + i] / 4;
  solve_lower(a, of.product, rows, columns);
  of.left = a, of.right = of.product;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t j = 0; j < columns; j++) of.check_element(r, j, {0, r});
  of.check_surroundings();
}

template <class T>
int check_all() {
  std::mt19937 random(7);
  int cases = 0;
  for (const int64_t rows : {1, 2, 5, 13, 25, 70})
    for (const int64_t columns : {1, 16, 17, 47, 65})
      for (const int64_t depth : {0, 1, 7, 64, 129})
        for (const bool transposed_left : {false, true})
          for (const Sum sum : {Sum::fresh, Sum::onto}) {
            check_whole<T>({rows, columns, depth}, transposed_left, sum, random);
            check_spans<T>({rows, columns, depth}, transposed_left, sum, random);
            cases++;
          }
  for (const bool transposed_left : {false, true}) {  // more tiles than a block has; as deep as L1
    check_whole<T>({211, 33, 3}, transposed_left, Sum::onto, random);
    check_whole<T>({31, 33, 1021}, transposed_left, Sum::fresh, random);
    check_spans<T>({211, 257, 211}, transposed_left, Sum::onto, random);
    cases += 3;
  }
  for (const int64_t rows : {1, 2, 13, 24, 64, 101})
    for (const int64_t columns : {1, 16, 50, 130}) check_solve<T>(rows, columns, random), cases++;
  check_matrices<T>(random);
  return cases;
}

int main() {
  const int cases = check_all<float>() + check_all<double>();
  std::printf("%d cases\n", cases);
}
