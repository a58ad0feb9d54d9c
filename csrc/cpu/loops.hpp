// SPDX-License-Identifier: Apache-2.0
// Loop tiling and unrolling: cache block sizes, tiles of rows, counts as constants.
#pragma once

#include <type_traits>

#include "core/bits.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Specializing loops on types and sizes is for speed; for plain C++ it would only cost minutes of compilation.
#ifdef LOWBIT_IS_SCALAR
constexpr bool kSpecializes = false;
#else
constexpr bool kSpecializes = true;
#endif

constexpr int64_t kL2Block = 256 << 10;  // half of the smallest L2 considered (512 KiB, Zen 2 and 3)
constexpr int64_t kL1Block = 16 << 10;   // half of a 32 KiB L1

// A range begin .. end - 1 of rows, columns, panels ...
struct Span {
  int64_t begin, end;
  LOWBIT_INLINE int64_t count() const { return end - begin; }
};

// Rows cut into tiles of at most `tile` rows whose heights differ by at most one: 32 rows in tiles of 6 are 6 6 5 5 5 5
// instead of 6 6 6 6 6 2, because a low tile has too few accumulators to hide the latency of an FMA.
struct RowTiles {
  int64_t rows, count;
  LOWBIT_INLINE RowTiles(int64_t rows, int64_t tile) : rows(rows), count(ceil_div(rows, tile)) {}
  LOWBIT_INLINE int64_t begin(int64_t tile) const { return tile * rows / count; }
  LOWBIT_INLINE int height(int64_t tile) const { return static_cast<int>(begin(tile + 1) - begin(tile)); }
};

// Tiles of one factor of a product: address of the first tile's rows, bytes from row to row and from tile to tile.
struct TileRows {
  const void* rows;
  int64_t stride, step = 0;
  LOWBIT_INLINE TileRows at(int64_t number) const { return {static_cast<const char*>(rows) + number * step, stride}; }
};

// Numbering of the tile registers (simd/amx.hpp), of 16 rows of 64 bytes each: 0 to 3 are accumulators, 4 and 5
// activations, 6 and 7 weights.
struct TileNumbers {
  static constexpr int64_t kRows = 16;
  static constexpr int kActivations = 4, kWeights = 6;
};

// Calls f(integral_constant<int, count>) for a count of 1..kMax.
template <int kMax, class F>
LOWBIT_INLINE void with_count(int count, F&& f) {
  if constexpr (kMax > 1) {
    if (count < kMax) return with_count<kMax - 1>(count, f);
  }
  f(std::integral_constant<int, kMax>{});
}

template <int kCount, class F>
LOWBIT_INLINE void unroll(F&& f) {
  if constexpr (kCount > 0) {
    unroll<kCount - 1>(f);
    f(std::integral_constant<int, kCount - 1>{});
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
