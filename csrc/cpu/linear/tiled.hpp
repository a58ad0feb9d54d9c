// SPDX-License-Identifier: Apache-2.0
// Products on the tile unit, for both kinds of factors (tiled_codes.hpp: int8 by codes; tiled_floats.hpp: bfloat16
// parts of floats). Two row tiles times two panels are multiplied at a time, one block of k after another: the weights
// of a block stay in L1 while all rows of a pass go by, and results stay in L2. Reading both factors from L2, the unit
// reached 330 of the 560 GMAC/s that it has from L1 (int8, one thread, Sapphire Rapids).
#pragma once

#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileSums = kTileRows * kPanelColumns;
constexpr int64_t kTilePass = 256;   // rows of a pass: half of an L2 with a block of k, and with the results of a task
constexpr int64_t kTilePanels = 16;  // max panels of a task
constexpr int kRowTilesAtOnce = 2, kPanelsAtOnce = 2;
constexpr int64_t kMaxSums = 17;  // max sums within a block of 512 k, in groups of 32 or more

// A tile product takes 16 cycles, however few of its rows are used.
constexpr int64_t kMinRows = 16;

// The operand of the loop, a Product, is created once per task and has
//   weight        the PackedWeight
//   Sum           int32_t or float
//   block_k       k of a block; weight_bytes: bytes of its weights per panel and k
//   k             all of k, to the end of the last sum; sum_k: the k of one sum, which shares a scale
//   step, tile_bytes  k of one tile of activations, and the bytes of its rows
//   weights(panel, k, length, room): the tiles of a block, in `room` unless the packed layout can be used
//   sums_are_products()  whether a sum is one product of two tiles
//   multiply<first tile, row tiles, panels>(row tile, begin, end, weights, block): adds products of k begin .. end, a
//     few whole steps, to the accumulators; block: the k at which the weights begin
//   scale_of_sum(panel, s): the argument of scale() for a panel
//   scale(sums, row tile, s, panel's argument, result): adds sum number s of a tile to its results
//   store_rows(sink, row, count, panel, results); store_rest(sink, count, panels): rows that the unit cannot compute

// The tiles of one task: results [row tile][panel], and sums to be continued in the next block of k.
template <class Product>
struct TileResults {
  using Sum = typename Product::Sum;
  using Tile = float[kTileSums];
  using SumTile = Sum[kTileSums];
  Tile* result;
  SumTile* open;  // null if every sum ends within its block
  int64_t width;  // number of panels
};

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

// Long sums, in kRowTiles x kPanels tiles at a time, within k begin .. end. While the unit computes one, the one before
// the last is scaled: a tile's stores are not forwarded to loads, which wait until the bytes are in L1.
template <class Product, int kRowTiles, int kPanels>
void multiply_block(const Product& product, const TileResults<Product>& to, int64_t row_tile, int64_t column,
                    int64_t begin, int64_t end, const uint8_t* const* weights,
                    const SumScale* const* scales) {
  using Sum = typename Product::Sum;
  constexpr int kTiles = kRowTiles * kPanels;
  alignas(64) Sum sums[2][kTiles][kTileSums];
  const auto at = [&](int c) { return (row_tile + c / kPanels) * to.width + column + c % kPanels; };
  const int64_t first = begin / product.sum_k;
  const auto take = [&](int64_t s) {
    for (int c = 0; c < kTiles; c++) {
      ResultRows result(to.result[at(c)]);
      product.scale(sums[s % 2][c], row_tile + c / kPanels, s, scales[c % kPanels][s - first], result);
      result.store_to(to.result[at(c)]);
    }
  };
  TileUnit::before_loads();
  int64_t taken = first, made = first;  // sums before these are in the results, in `sums`
  for (int64_t k = begin; k < end;) {
    const int64_t s = k / product.sum_k, sum_end = smaller((s + 1) * product.sum_k, product.k);
    if (k == s * product.sum_k) unroll<kTiles>([](auto c) { TileUnit::zero<c>(); });
    else unroll<kTiles>([&](auto c) { TileUnit::load<c>(to.open[at(c)], 64); });
    const int64_t stop = smaller(end, sum_end);
    product.template multiply<0, kRowTiles, kPanels>(row_tile, k, stop, weights, begin);
    k = stop;
    if (made - taken == 2) take(taken++);
    if (k == sum_end) unroll<kTiles>([&](auto c) { TileUnit::store<c>(sums[made % 2][c]); }), made++;
    else unroll<kTiles>([&](auto c) { TileUnit::store<c>(to.open[at(c)]); });
  }
  while (taken < made) take(taken++);
}

// Sums of one product, all ending within the block: scaling them is most of the work, so the results of one tile stay
// in registers. From two products per sum on, multiply_block takes 0.87 to 0.96 of the time (nf4 and int4 in groups of
// 64, Sapphire Rapids).
template <class Product>
void multiply_short_sums(const Product& product, float* results, int64_t row_tile, int64_t begin, int64_t end,
                         const uint8_t* weights, const SumScale* scales) {
  using Sum = typename Product::Sum;
  alignas(64) Sum sums[2][kTileSums];
  ResultRows result(results);
  TileUnit::before_loads();
  const int64_t first = begin / product.sum_k, last = ceil_div(end, product.sum_k);
  const auto sum = [&](auto tile, int64_t s) __attribute__((always_inline)) {
    TileUnit::zero<tile>();
    product.template multiply<tile, 1, 1>(row_tile, s * product.sum_k, smaller(end, (s + 1) * product.sum_k), &weights,
                                          begin);
    if (s > first + 1) product.scale(sums[tile], row_tile, s - 2, scales[s - 2 - first], result);
    TileUnit::store<tile>(sums[tile]);
  };
  for (int64_t s = first; s < last; s += 2) {
    sum(std::integral_constant<int, 0>{}, s);
    if (s + 1 < last) sum(std::integral_constant<int, 1>{}, s + 1);
  }
  for (int64_t s = larger(first, last - 2); s < last; s++)
    product.scale(sums[(s - first) % 2], row_tile, s, scales[s - first], result);
  result.store_to(results);
}

template <class Product>
struct TileTask {
  const Product& product;
  const Sink& sink;
  int64_t rows, first_panel, width;

  void run() const {
    const int64_t row_tiles = ceil_div(rows, kTileRows), room_bytes = product.block_k * product.weight_bytes;
    Arena counted;
    arrays(counted, row_tiles);
    const Scratch memory(counted.bytes);
    Arena arena = memory.arena();
    const auto [to, room, scale_room] = arrays(arena, row_tiles);
    std::memset(to.result, 0, row_tiles * width * sizeof *to.result);
    for (int64_t k = 0; k < product.k; k += product.block_k) {
      const int64_t end = smaller(product.k, k + product.block_k);
      for (int64_t column = 0; column < width; column += kPanelsAtOnce) {
        const int count = static_cast<int>(smaller(kPanelsAtOnce, width - column));
        const uint8_t* weights[kPanelsAtOnce] = {};
        const SumScale* scales[kPanelsAtOnce] = {};
        for (int p = 0; p < count; p++) {
          const int64_t panel = first_panel + column + p;
          weights[p] = product.weights(panel, k, end - k, room + p * room_bytes);
          scales[p] = scales_of(panel, k, end, scale_room + p * kMaxSums);
        }
        multiply(to, column, count, k, end, weights, scales);
      }
    }
    for (int64_t row = 0; row < rows; row += kTileRows)
      for (int64_t column = 0; column < width; column++)
        product.store_rows(sink, row, smaller(kTileRows, rows - row), first_panel + column,
                           to.result[row / kTileRows * width + column]);
  }

 private:
  // The scales of the sums within k begin .. end, in `room`.
  const SumScale* scales_of(int64_t panel, int64_t begin, int64_t end, SumScale* room) const {
    const int64_t first = begin / product.sum_k;
    for (int64_t s = first; s * product.sum_k < end; s++) room[s - first] = product.scale_of_sum(panel, s);
    return room;
  }

  // All rows times `count` panels, over a block of k.
  void multiply(const TileResults<Product>& to, int64_t column, int count, int64_t k, int64_t end,
                const uint8_t* const* weights, const SumScale* const* scales) const {
    const int64_t row_tiles = ceil_div(rows, kTileRows);
    if (product.sums_are_products()) {
      for (int64_t tile = 0; tile < row_tiles; tile++)
        for (int p = 0; p < count; p++)
          multiply_short_sums(product, to.result[tile * width + column + p], tile, k, end, weights[p], scales[p]);
      return;
    }
    with_count<kPanelsAtOnce>(count, [&](auto kPanels) {
      for (int64_t tile = 0; tile < row_tiles; tile += kRowTilesAtOnce)
        with_count<kRowTilesAtOnce>(static_cast<int>(smaller(kRowTilesAtOnce, row_tiles - tile)), [&](auto kRows) {
          multiply_block<Product, kRows, kPanels>(product, to, tile, column, k, end, weights, scales);
        });
    });
  }

  struct Arrays {
    TileResults<Product> to;
    uint8_t* room;
    SumScale* scales;
  };
  Arrays arrays(Arena& arena, int64_t row_tiles) const {
    using Results = TileResults<Product>;
    const bool goes_on = smaller(product.k, int64_t{product.block_k}) % product.sum_k != 0;
    return {{.result = arena.array<typename Results::Tile>(row_tiles * width),
             .open = goes_on ? arena.array<typename Results::SumTile>(row_tiles * width) : nullptr,
             .width = width},
            arena.array<uint8_t>(kPanelsAtOnce * product.block_k * product.weight_bytes),
            arena.array<SumScale>(kPanelsAtOnce * kMaxSums)};
  }
};

// A task has all rows of a pass.
constexpr PanelCut kTiledCut{.at_once = kPanelsAtOnce, .max = kTilePanels, .tasks = 4};

template <class Product>
void multiply_by_tiles(const Product& product, const Sink& sink, int64_t rows, Span panels) {
  const TileUnit unit(product.tile_bytes);
  TileTask<Product>{product, sink, rows, panels.begin, panels.count()}.run();
  product.store_rest(sink, rows, panels);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
