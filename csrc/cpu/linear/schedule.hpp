// SPDX-License-Identifier: Apache-2.0
// How work is cut: sizes in bytes of what should stay in a cache, and how many panels one task takes.
#pragma once

#include "core/parallel.hpp"
#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kL2Block = 256 << 10;  // half of the smallest L2 that we care about (512 KiB, Zen 2 and 3)
constexpr int64_t kL1Block = 16 << 10;   // half of a 32 KiB L1

// A parallel region costs 2 to 5 us (20 on a busy machine), as much as this many products on one AVX2 core: below it the caller works alone.
constexpr int64_t kSerialProducts = 1 << 18;

LOWBIT_INLINE int threads_for_products(int64_t m, const WeightSpec& spec) {
  return m * spec.n * spec.k < kSerialProducts ? 1 : num_threads();
}

// At least eight tasks a thread, so that one slow thread costs little; at most eight panels a task; a multiple of the tile.
LOWBIT_INLINE int64_t panel_chunk(int64_t panels, int64_t threads, int64_t tile) {
  const int64_t wanted = larger(1, smaller(8, panels / (threads * 8)));
  return round_up(wanted, tile);
}

// Rows cut into tiles of at most `tile` rows whose heights differ by one at most: 32 rows in tiles of 6 are 6 6 5 5 5 5 and not 6 6 6 6 6 2,
// because a low tile has too few sums to hide the latency of an FMA.
struct RowTiles {
  int64_t rows, count;
  LOWBIT_INLINE RowTiles(int64_t rows, int64_t tile) : rows(rows), count(ceil_div(rows, tile)) {}
  LOWBIT_INLINE int64_t begin(int64_t tile) const { return tile * rows / count; }
  LOWBIT_INLINE int height(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

// Calls f(integral_constant<int, count>) for a count of 1..kMax.
template <int kMax, class F>
LOWBIT_INLINE void with_count(int count, F&& f) {
  if constexpr (kMax > 1) {
    if (count < kMax) return with_count<kMax - 1>(count, f);
  }
  f(std::integral_constant<int, kMax>{});
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
