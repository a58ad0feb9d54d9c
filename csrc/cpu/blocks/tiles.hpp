// SPDX-License-Identifier: Apache-2.0
// How the products of this folder divide their work: a task is 16 columns of y, a few rows at a time.
#pragma once

#include "core/parallel.hpp"
#include "cpu/loops.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTaskColumns = 16;
constexpr int kMaxRowsOfX = 4;  // rows of x that share each decoded weight

// Calls make(rows, begin, first, count) for rows [begin, begin + rows) and columns [first, first + count) of y [m, n].
template <class Make>
void for_each_tile(int64_t m, int64_t k, int64_t n, const Make& make) {
  const RowTiles tiles(m, kMaxRowsOfX);
  parallel_for(ceil_div(n, kTaskColumns), threads_worth(m * n * k), [&](int64_t task) {
    const int64_t first = task * kTaskColumns, count = smaller(kTaskColumns, n - first);
    for (int64_t tile = 0; tile < tiles.count; tile++)
      with_count<kMaxRowsOfX>(tiles.height(tile), [&](auto rows) { make(rows, tiles.begin(tile), first, count); });
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
