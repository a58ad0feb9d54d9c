// SPDX-License-Identifier: Apache-2.0
// The products of cpu/part_products.hpp on one tile unit against sums of float64. Started by
// tests/cpp/test_tile_products.py, which says the unit.
#include LOWBIT_ISA_HEADER

#include "cpu/part_products.hpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

using namespace lowbit;
using namespace lowbit::cpu::LOWBIT_ISA_NAME;

enum class Values { bfloat16, float16, float32 };

struct Memory {
  std::vector<char> bytes = std::vector<char>(4 << 20);
  TileArena arena{};
  Memory() { arena.base = reinterpret_cast<char*>(round_up(reinterpret_cast<int64_t>(bytes.data()), 64)); }
};

struct Case {
  ProductSize size;
  Values values;
  bool transposed_left, transposed_right, contiguous_parts;
  Sum sum;
  Span panels, steps;

  std::string text() const {
    return "rows=" + std::to_string(size.rows) + " columns=" + std::to_string(size.columns) +
           " depth=" + std::to_string(size.depth) + " values=" + std::to_string(static_cast<int>(values)) +
           " transposed=" + std::to_string(transposed_left) + std::to_string(transposed_right) +
           " onto=" + std::to_string(sum == Sum::onto) + ": ";
  }
};

float drawn(Values values, std::mt19937& random) {
  const float x = std::normal_distribution<float>()(random);
  if (values == Values::bfloat16) return float_from_bfloat16(bfloat16_from_float(x));
  return values == Values::float16 ? float_from_float16(float16_from_float(x)) : x;
}

// A matrix of random values, zeros behind its last row and column, up to multiples of 32 and 16; and its transpose.
struct Factor {
  Matrix<float> m, t;
  Factor(int64_t rows, int64_t columns, Values values, TileArena& arena, std::mt19937& random)
      : m(arena.matrix<float>(round_up(rows, kStep), columns)), t(arena.matrix<float>(round_up(columns, kStep), rows)) {
    clear_rows(m, round_up(rows, kStep)), clear_rows(t, round_up(columns, kStep));
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < columns; c++) m.row(r)[c] = t.row(c)[r] = drawn(values, random);
  }
};

template <int kParts>
PartRows left_factor(const Case& test, const Factor& a, TileArena& arena) {
  const int64_t rows = round_up(test.size.rows, kTileRows);
  PartRows to = part_rows<kParts>(rows, test.size.depth, arena);
  if (test.contiguous_parts) to.step = kStepBytes, to.part = steps_of(test.size.depth) * kStepBytes;
  if (test.transposed_left)
    for (int64_t step = 0; step < steps_of(test.size.depth); step++)
      cut_columns<kParts>(a.t.from(step * kStep), test.size.rows, step, to);
  else cut_rows<kParts>(a.m, rows, {0, test.size.depth}, to);
  return to;
}

// b_steps: one more than is needed, as in memory for larger matrices.
template <int kParts>
const uint8_t* right_factor(const Case& test, const Factor& b, int64_t b_steps, TileArena& arena) {
  const int64_t steps = steps_of(test.size.depth), panels = ceil_div(test.size.columns, 16);
  uint8_t* to = arena.array<uint8_t>(panels * b_steps * kParts * kTileBytes);
  if (!test.transposed_right) {
    pack_tiles<kParts>(b.m, steps, {0, test.size.columns}, b_steps, to);
    return to;
  }
  const PartRows rows = part_rows<kParts>(kTileRows, test.size.depth, arena);
  for (int64_t p = 0; p < panels; p++) {
    cut_rows<kParts>(b.t.from(p * 16), kTileRows, {0, test.size.depth}, rows);
    transpose_parts(rows, steps * kParts, to + p * b_steps * kParts * kTileBytes);
  }
  return to;
}

// The error is what rounding left of each factor, the pair of second parts, and that of sums in float32.
template <int kParts, Pairs kPairs>
double relative_error(const Case& test) {
  const bool exact = test.values == Values::bfloat16 || (kParts == 2 && test.values == Values::float16);
  const double cut = exact ? 0 : kParts == 1 ? 0x1p-7 + 0x1p-16 : 0x1p-15;
  const double pair = kParts == 2 && kPairs == Pairs::not_last ? 0x1p-16 : 0;
  return cut + pair + 0x1p-23 * static_cast<double>(test.size.depth + 1);
}

template <int kParts, Pairs kPairs>
bool right(const Case& test, std::mt19937& random) {
  Memory memory;
  TileArena& arena = memory.arena;
  const auto [rows, columns, depth] = test.size;
  const Factor a(rows, depth, test.values, arena, random), b(depth, columns, test.values, arena, random);
  const int64_t b_steps = steps_of(depth) + 1, row_tiles = ceil_div(rows, kTileRows);
  const Matrix<float> c = arena.matrix<float>(row_tiles * kTileRows + 1, columns),
                      before = arena.matrix<float>(row_tiles * kTileRows + 1, columns);
  for (int64_t i = 0; i < (row_tiles * kTileRows + 1) * c.stride; i++)
    c.data[i] = before.data[i] = drawn(Values::float32, random);
  int64_t meanwhile = 0;
  {
    const TileUnit unit(kStepBytes);
    multiply<kParts, kPairs>({.a = left_factor<kParts>(test, a, arena),
                              .b = right_factor<kParts>(test, b, b_steps, arena),
                              .b_steps = b_steps,
                              .c = c,
                              .row_tiles = row_tiles,
                              .panels = test.panels,
                              .steps = test.steps,
                              .sum = test.sum},
                             [&] { meanwhile++; });
  }
  const int64_t blocks = ceil_div(row_tiles, 2) * ceil_div(test.panels.count(), 2);
  if (meanwhile != blocks * test.steps.count())
    return std::printf("%sa product went on %ld times\n", test.text().c_str(), static_cast<long>(meanwhile)), false;
  for (int64_t r = 0; r <= row_tiles * kTileRows; r++)
    for (int64_t j = 0; j < c.stride; j++) {
      const bool computed = r < row_tiles * kTileRows && j >= 16 * test.panels.begin && j < 16 * test.panels.end;
      if (!computed && c.row(r)[j] != before.row(r)[j])
        return std::printf("%smemory around the product was written\n", test.text().c_str()), false;
      if (!computed || r >= rows || j >= columns) continue;
      double sum = test.sum == Sum::onto ? static_cast<double>(before.row(r)[j]) : 0, magnitude = std::fabs(sum);
      for (int64_t i = test.steps.begin * kStep; i < smaller(depth, test.steps.end * kStep); i++) {
        const double term = static_cast<double>(a.m.row(r)[i]) * static_cast<double>(b.m.row(i)[j]);
        sum += term, magnitude += std::fabs(term);
      }
      const double got = static_cast<double>(c.row(r)[j]);
      if (!(std::fabs(got - sum) <= relative_error<kParts, kPairs>(test) * magnitude))
        return std::printf("%sc[%ld][%ld] is %g, not %g\n", test.text().c_str(), static_cast<long>(r),
                           static_cast<long>(j), got, sum), false;
    }
  return true;
}

int main() {
  std::mt19937 random(7);
  int cases = 0;
  for (const int64_t rows : {1, 16, 37})
    for (const int64_t columns : {1, 33, 64})
      for (const int64_t depth : {5, 32, 47, 129})
        for (const Values values : {Values::bfloat16, Values::float16, Values::float32})
          for (const int way : {0, 1, 2, 3}) {
            const int64_t panels = ceil_div(columns, 16), steps = steps_of(depth);
            Case test{.size = {rows, columns, depth}, .values = values, .transposed_left = way % 2 == 1,
                      .transposed_right = way >= 2, .contiguous_parts = way == 1 || way == 2,
                      .sum = cases % 2 ? Sum::onto : Sum::fresh, .panels = {0, panels}, .steps = {0, steps}};
            if (cases % 5 == 4) test.panels.begin = panels / 2, test.steps.begin = steps / 2;
            if (cases % 7 == 6) test.steps.end = larger(test.steps.begin, steps - 1);
            if (!right<1, Pairs::all>(test, random) || !right<2, Pairs::all>(test, random) ||
                !right<2, Pairs::not_last>(test, random))
              return 1;
            cases++;
          }
  std::printf("%d cases\n", cases);
}
