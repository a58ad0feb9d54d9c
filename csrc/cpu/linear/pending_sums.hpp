// SPDX-License-Identifier: Apache-2.0
// The last sums of some tiles, which wait to be scaled, added to their results and stored to y while the tile unit
// computes the next ones: a few rows at a time, because the processor looks only some hundred instructions ahead.
#pragma once

#include "cpu/linear/epilogue.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileSums = kTileRows * kPanelColumns;
constexpr int kRowTilesAtOnce = 2, kPanelsAtOnce = 2, kTilesAtOnce = kRowTilesAtOnce * kPanelsAtOnce;

// The scale and zero point of a sum, for each of the 16 columns of a panel. Computed once for all rows of a pass:
// computed per tile, they took 7 to 13 % of the time with groups of 32 (Sapphire Rapids).
struct SumScale {
  f32x16 scale, zero;
};

// 16 rows of a panel's results in registers, to which scaled sums are added.
struct ResultRows {
  f32x16 row[kTileRows];
  LOWBIT_INLINE explicit ResultRows(const float* tile) {
    unroll<kTileRows>([&](auto i) __attribute__((always_inline)) { row[i] = load(tile + i * kPanelColumns); });
  }
  LOWBIT_INLINE void store_to(float* tile) const {
    unroll<kTileRows>([&](auto i) __attribute__((always_inline)) { store(tile + i * kPanelColumns, row[i]); });
  }
};

// Whether values go to y as they are, in order.
LOWBIT_INLINE bool only_stores(const Sink& sink) {
  return !sink.bias && sink.activation == Activation::none && !sink.mul && !sink.add && !sink.index && !sink.factor &&
         !sink.low_rank;
}

template <class Product>
class PendingSums {
 public:
  using Sum = typename Product::Sum;
  // Sums number s of `tiles` tiles, `panels` (1 or 2) beside each other.
  struct Tiles {
    int64_t row_tile, s, panel;
    int panels, tiles;
    const float* result;
    int64_t row_stride;  // of results, from one row tile to the next
  };

  PendingSums(const Product& product, const Sink& sink, int64_t rows) : product_(product), sink_(sink), rows_(rows) {}

  // Prefetches the lines of y of a tile of rows, which may lie in L3.
  LOWBIT_INLINE void fetch_y(int64_t row_tile, int64_t panel, int panels) const {
    const int64_t first = row_tile * kTileRows, end = smaller(rows_, first + kTileRows), size = size_of(sink_.dtype),
                  column = panel * kPanelColumns - sink_.column;
    for (int64_t row = first; row < end; row++) {
      const char* const at = static_cast<const char*>(sink_.y) + (sink_.row(row) * sink_.stride + column) * size;
      for (int64_t byte = 0; byte < panels * kPanelColumns * size; byte += 64) __builtin_prefetch(at + byte, 1);
    }
  }

  // Where the next sums go, tile by tile.
  LOWBIT_INLINE Sum (&room(int tile))[kTileSums] { return sums_[1 - now_][tile]; }

  // The sums in room() are pending now; those before them were taken.
  LOWBIT_INLINE void start(const Tiles& tiles, const SumScale* const* scales, int64_t number) {
    tiles_ = tiles, now_ = 1 - now_, taken_ = 0, count_ = tiles.tiles * kTileRows;
    for (int p = 0; p < tiles.panels; p++) scale_[p] = scales[p][number];
  }
  LOWBIT_INLINE void take(int64_t count) {
    if (taken_ < count_) take_rows(smaller(count_, taken_ + count));
  }
  LOWBIT_INLINE void take_all() { take(kTilesAtOnce * kTileRows); }

 private:
  [[gnu::noinline]] void take_rows(int64_t end) {
    while (taken_ < end) {
      const int64_t tile = taken_ / kTileRows, p = tile & (tiles_.panels - 1),
                    stop = smaller(end, (tile + 1) * kTileRows);
      const Span rows{taken_ % kTileRows, taken_ % kTileRows + stop - taken_};
      const int64_t column = (tiles_.panel + p) * kPanelColumns;
      const bool whole = column + kPanelColumns <= product_.weight.spec.n;
      if (tiles_.s || !whole || !product_.only_scales(sink_))
        take_tile(tile, rows, [&](auto, const PanelEnd& end, int64_t row, f32x16 value) {
          product_.store_row(sink_, end, row, tiles_.panel + p, value);
        });
      else if (sink_.dtype == DType::float32) take_plain<DType::float32>(tile, rows, column);
      else if (sink_.dtype == DType::bfloat16) take_plain<DType::bfloat16>(tile, rows, column);
      else take_plain<DType::float16>(tile, rows, column);
      taken_ = stop;
    }
  }

  // Without bias, activation and the like a row takes a third of the instructions. Products and sums of 512 x 256 x 576
  // take 0.105 ms instead of 0.136 (W8A8), 0.162 instead of 0.214 (bfloat16; one thread, Emerald Rapids).
  template <DType kDType>
  LOWBIT_INLINE void take_plain(int64_t tile, Span rows, int64_t column) {
    char* const y = static_cast<char*>(sink_.y);
    const int64_t stride = sink_.stride, at = sink_.first * stride + column - sink_.column;
    const auto store_row = [=](auto of_rows, const PanelEnd& end, int64_t row, f32x16 value)
                               __attribute__((always_inline)) {
      store_from_float(y, kDType, at + row * stride, kPanelColumns, of_rows.end(value, end, row));
    };
    take_tile(tile, rows, store_row);
  }

  template <class Store>
  LOWBIT_INLINE void take_tile(int64_t tile, Span rows, Store&& store_row) {
    const int64_t p = tile & (tiles_.panels - 1), below = tile >> (tiles_.panels - 1),
                  row_tile = tiles_.row_tile + below, first = row_tile * kTileRows,
                  end = smaller(rows.end, rows_ - first);
    const PanelEnd panel_end = product_.panel_end(sink_, tiles_.panel + p);
    const auto of_rows = product_.of_rows(row_tile, tiles_.s);
    const SumScale scale = scale_[p];
    const Sum* const sums = sums_[now_][tile];
    const float* const results = tiles_.s ? tiles_.result + below * tiles_.row_stride + p * kTileSums : nullptr;
    for (int64_t i = rows.begin; i < end; i++)
      store_row(of_rows, panel_end, first + i,
                of_rows.add(sums + i * kPanelColumns, i, scale,
                            results ? load(results + i * kPanelColumns) : set1(0.0f)));
  }

  alignas(64) Sum sums_[2][kTilesAtOnce][kTileSums];
  SumScale scale_[kPanelsAtOnce];
  const Product& product_;
  const Sink& sink_;
  const int64_t rows_;
  Tiles tiles_{};
  int now_ = 0;
  int64_t taken_ = 0, count_ = 0;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
