// SPDX-License-Identifier: Apache-2.0
// Products on the tile unit, for both kinds of factors (tiled_codes.hpp: int8 by codes; tiled_floats.hpp: bfloat16
// parts of floats). Two row tiles times two panels are multiplied at a time, over one block of k after another:
//
//   a block of weights    2 panels, in L1 while all rows of a pass go by; the next one is prefetched into L2 meanwhile
//   activations           in L2, passing by L1 once per block
//   sums of a block       scaled, added and stored to y row by row while the unit multiplies the next tiles
//
// One thread of an Emerald Rapids, int8 from L2 and L3, as a share of the unit's peak: 50 % as it was before (blocks of
// 512 k, ordinary loads, no prefetch), 55 % with the prefetch, 62 % with passing loads and blocks of 1024 k, 70 % with
// all of k for two panels before the next two, so that results are few.
#pragma once

#include "cpu/linear/activations.hpp"
#include "cpu/linear/pending_sums.hpp"
#include "cpu/linear/schedule.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTilePass = 256;  // rows of a pass
constexpr int64_t kTilePanels = TileUnit::kL2 >> 16;  // max panels of a task: results have a quarter of L2
constexpr int64_t kMaxBlockK = 1024;
constexpr int64_t kMaxSums = kMaxBlockK / 32 + 1;  // max sums within a block, in groups of 32 or more

// A tile product takes 16 cycles, however few of its rows are used.
constexpr int64_t kMinRows = 16;

// The k of a block: all of k in equal parts, of at most `max`; half of that in groups, whose results are in L1 too.
LOWBIT_INLINE int64_t equal_blocks(int64_t k, int64_t sum_k, int64_t max) {
  const int64_t most = sum_k < smaller(k, max) ? max / 2 : max;
  return round_up(ceil_div(k, ceil_div(k, most)), kTileK);
}

// Calls body(f), f(tiles) being how activations are loaded: past L1, where the weights of long sums stay. Short sums
// take 1.1 times as long with that.
template <class Body>
LOWBIT_INLINE void with_x_tiles(bool long_sums, Body&& body) {
  if constexpr (!TileUnit::kSumsInRegisters)
    if (long_sums) return body([](TileRows tiles) __attribute__((always_inline)) { return PassingRows{tiles}; });
  body([](TileRows tiles) __attribute__((always_inline)) { return tiles; });
}

// The operand of the loop, a Product, is created once per task and has
//   weight        the PackedWeight
//   Sum           int32_t or float
//   block_k       k of a block; weight_bytes: bytes of its weights per panel and k
//   k             all of k, to the end of the last sum; sum_k: the k of one sum, which shares a scale
//   step, tile_bytes  k of one tile of activations, and the bytes of its rows
//   row_bytes()   bytes of a row of activations; long_sums(): whether a sum has a whole block or more
//   weights(panel, k, length, room): the tiles of a block, in `room` unless the packed layout can be used
//   sums_are_products()  whether a sum is one product of two tiles
//   multiply<first tile, row tiles, panels>(row tile, begin, end, weights, block, meanwhile): adds products of k begin
//     .. end, a few whole steps, to the accumulators; block: the k at which the weights begin
//   scale_of_sum(panel, s): the argument of scale() for a panel
//   scale(sums, row tile, s, panel's argument, result): adds sum number s of a tile to its results
//   groups_in_registers(), multiply_groups(row tile, block, results): where the unit has add_groups, whether results can
//     be computed without sums in memory, and their computation
//   of_rows(row tile, s): what that needs of rows. add(..) adds a row of sums, end(..) ends it if only_scales(sink)
//   panel_end(sink, panel), store_row(sink, end, row, panel, value): a row of results to y
//   store_rows(sink, row, count, panel, results): several
//   store_rest(sink, count, panels): rows that the unit cannot compute

// The tiles of some panels: results [row tile][panel], and sums to be continued in the next block of k.
template <class Product>
struct TileResults {
  using Sum = typename Product::Sum;
  using Tile = float[kTileSums];
  using SumTile = Sum[kTileSums];
  Tile* result;
  SumTile* open;  // null if every sum ends within its block
  int64_t width;  // number of panels
};

// The weights of some panels over k begin .. end. column: the first panel among the results.
struct WeightBlock {
  int64_t begin, end, panel, column;
  int panels;
  const uint8_t* weights[kPanelsAtOnce];
  const SumScale* scales[kPanelsAtOnce];
};

// Prefetches the packed codes of the next block into L2, some lines at a time.
class NextBlock {
 public:
  LOWBIT_INLINE void start(const WeightSpec& spec, const uint8_t* weight, Span panels, Span k, int64_t fetches) {
    const int64_t bytes = ceil_div(k.count(), kTileK) * spec.tile_bytes();
    for (int p = 0; p < kPanelsAtOnce; p++) {
      const uint8_t* const codes = weight + (panels.begin + p) * spec.panel_bytes() + spec.codes_at();
      at_[p] = codes + k.begin / kTileK * spec.tile_bytes();
      end_[p] = panels.begin + p < panels.end ? at_[p] + bytes : at_[p];
    }
    lines_ = ceil_div(bytes / 64, larger(1, fetches));
  }
  LOWBIT_INLINE void fetch() {
    for (int p = 0; p < kPanelsAtOnce; p++)
      for (int64_t line = 0; line < lines_ && at_[p] < end_[p]; line++, at_[p] += 64) __builtin_prefetch(at_[p], 0, 2);
  }

 private:
  const uint8_t *at_[kPanelsAtOnce], *end_[kPanelsAtOnce];
  int64_t lines_;
};

template <class Product>
struct TileTask {
  const Product& product;
  const Sink& sink;
  int64_t rows, first_panel, width;

  void run() const {
    const int64_t strip = smaller(width, panels_at_once());
    Arena counted;
    arrays(counted, strip);
    const Scratch memory(counted.bytes);
    Arena arena = memory.arena();
    const auto [to, room, scale_room] = arrays(arena, strip);
    PendingSums<Product> pending(product, sink, rows);
    NextBlock next;
    const bool adds = product.sum_k < product.k || product.sums_are_products();  // to results, from zero
    for (int64_t first = 0; first < width; first += strip) {
      if (adds) {
        pending.take_all();
        std::memset(to.result, 0, ceil_div(rows, kTileRows) * strip * sizeof *to.result);
      }
      for (int64_t k = 0; k < product.k; k += product.block_k)
        for (int64_t column = 0; column < smaller(strip, width - first); column += kPanelsAtOnce) {
          WeightBlock block{k, smaller(product.k, k + product.block_k), first_panel + first + column, column,
                            static_cast<int>(smaller(kPanelsAtOnce, smaller(strip, width - first) - column)), {}, {}};
          for (int p = 0; p < block.panels; p++) {
            block.weights[p] = product.weights(block.panel + p, k, block.end - k,
                                               room + p * product.block_k * product.weight_bytes);
            block.scales[p] = scales_of(block.panel + p, k, block.end, scale_room + p * kMaxSums);
          }
          if (product.long_sums()) start(next, block, strip);
          multiply(to, block, pending, next);
        }
    }
    pending.take_all();
  }

 private:
  // The panels that are multiplied over all of k before the next ones: few if their rows stay in L2 as a whole, else so
  // many that a block of rows is used as often as it can be.
  int64_t panels_at_once() const {
    if (!product.long_sums()) return 16;
    return rows * product.row_bytes() * 16 <= TileUnit::kL2 * 9 ? kPanelsAtOnce : kTilePanels;
  }

  // Steps of a block over all rows.
  int64_t fetches(const WeightBlock& block) const {
    return ceil_div(ceil_div(rows, kTileRows), kRowTilesAtOnce) * ceil_div(block.end - block.begin, product.step);
  }
  void start(NextBlock& next, const WeightBlock& block, int64_t strip) const {
    const WeightSpec& spec = product.weight.spec;
    const int64_t begin = first_panel + (block.panel - first_panel) / strip * strip,
                  end = smaller(begin + strip, first_panel + width), after = block.panel + kPanelsAtOnce;
    Span panels{after, spec.panels()}, k{block.begin, block.end};
    if (after >= end) {
      k = {block.end < product.k ? block.end : 0, smaller(product.k, block.end + product.block_k)};
      if (block.end < product.k) panels.begin = begin;
      else k.end = smaller(product.k, product.block_k);
    }
    next.start(spec, product.weight.data, panels, k, fetches(block));
  }

  // The scales of the sums within k begin .. end, in `room`.
  const SumScale* scales_of(int64_t panel, int64_t begin, int64_t end, SumScale* room) const {
    const int64_t first = begin / product.sum_k;
    for (int64_t s = first; s * product.sum_k < end; s++) room[s - first] = product.scale_of_sum(panel, s);
    return room;
  }

  // All rows times the panels of a block.
  void multiply(const TileResults<Product>& to, const WeightBlock& block, PendingSums<Product>& pending,
                NextBlock& next) const {
    const int64_t row_tiles = ceil_div(rows, kTileRows);
    if constexpr (requires { product.groups_in_registers(); })
      if (product.groups_in_registers()) {
        with_count<kPanelsAtOnce>(block.panels, [&](auto kPanels) {
          for (int64_t tile = 0; tile < row_tiles; tile++) multiply_groups<kPanels>(to, block, tile);
        });
        return;
      }
    if (product.sums_are_products()) {
      for (int64_t tile = 0; tile < row_tiles; tile++)
        for (int p = 0; p < block.panels; p++) multiply_short_sums(to, block, tile, p);
      return;
    }
    with_count<kPanelsAtOnce>(block.panels, [&](auto kPanels) {
      for (int64_t tile = 0; tile < row_tiles; tile += kRowTilesAtOnce)
        with_count<kRowTilesAtOnce>(static_cast<int>(smaller(kRowTilesAtOnce, row_tiles - tile)), [&](auto kRows) {
          multiply_block<kRows, kPanels>(to, block, tile, pending, next);
        });
    });
  }

  // Long sums, in kRowTiles x kPanels tiles at a time. While the unit computes one, the one before the last is scaled:
  // a tile's stores are not forwarded to loads, which wait until the bytes are in L1. The last sum stays pending.
  template <int kRowTiles, int kPanels>
  void multiply_block(const TileResults<Product>& to, const WeightBlock& block, int64_t row_tile,
                      PendingSums<Product>& pending, NextBlock& next) const {
    using Sum = typename Product::Sum;
    constexpr int kTiles = kRowTiles * kPanels;
    alignas(64) Sum sums[2][kTiles][kTileSums];
    const auto at = [&](int c) { return (row_tile + c / kPanels) * to.width + block.column + c % kPanels; };
    const int64_t first = block.begin / product.sum_k;
    const auto take = [&](int64_t s) {
      pending.take_all();
      for (int c = 0; c < kTiles; c++) {
        ResultRows result(to.result[at(c)]);
        product.scale(sums[s % 2][c], row_tile + c / kPanels, s, block.scales[c % kPanels][s - first], result);
        result.store_to(to.result[at(c)]);
      }
    };
    const bool long_sums = product.long_sums();
    const int64_t share = ceil_div(kTilesAtOnce * kTileRows, ceil_div(block.end - block.begin, product.step));
    const auto meanwhile = [&] {
      if (!long_sums) return;
      pending.take(share);
      next.fetch();
    };
    if (block.end == product.k)
      for (int r = 0; r < kRowTiles; r++) pending.fetch_y(row_tile + r, block.panel, kPanels);
    TileUnit::before_loads();
    int64_t taken = first, made = first;  // sums before these are in the results, in `sums`
    for (int64_t k = block.begin; k < block.end;) {
      const int64_t s = k / product.sum_k, sum_end = smaller((s + 1) * product.sum_k, product.k);
      if (k == s * product.sum_k) unroll<kTiles>([](auto c) { TileUnit::zero<c>(); });
      else unroll<kTiles>([&](auto c) { TileUnit::load<c>(to.open[at(c)], 64); });
      const int64_t stop = smaller(block.end, sum_end);
      product.template multiply<0, kRowTiles, kPanels>(row_tile, k, stop, block.weights, block.begin, meanwhile);
      k = stop;
      if (made - taken == 2) take(taken++);
      if (k < sum_end) {
        unroll<kTiles>([&](auto c) { TileUnit::store<c>(to.open[at(c)]); });
      } else if (k < product.k) {
        unroll<kTiles>([&](auto c) { TileUnit::store<c>(sums[made % 2][c]); }), made++;
      } else {
        while (taken < made) take(taken++);
        pending.take_all();
        unroll<kTiles>([&](auto c) { TileUnit::store<c>(pending.room(c)); });
        pending.start({.row_tile = row_tile, .s = s, .panel = block.panel, .panels = kPanels, .tiles = kTiles,
                       .result = to.result[at(0)], .row_stride = to.width * kTileSums},
                      block.scales, s - first);
      }
    }
    while (taken < made) take(taken++);
  }

  // Sums of one product, all ending within the block: scaling them is most of the work, so the results of one tile stay
  // in registers. From two products per sum on, multiply_block takes 0.87 to 0.96 of the time (nf4 and int4 in groups
  // of 64, Sapphire Rapids).
  void multiply_short_sums(const TileResults<Product>& to, const WeightBlock& block, int64_t row_tile, int p) const {
    using Sum = typename Product::Sum;
    alignas(64) Sum sums[2][kTileSums];
    float* const results = to.result[row_tile * to.width + block.column + p];
    ResultRows result(results);
    TileUnit::before_loads();
    const int64_t first = block.begin / product.sum_k, last = ceil_div(block.end, product.sum_k);
    const SumScale* const scales = block.scales[p];
    const auto sum = [&](auto tile, int64_t s) __attribute__((always_inline)) {
      TileUnit::zero<tile>();
      product.template multiply<tile, 1, 1>(row_tile, s * product.sum_k, smaller(block.end, (s + 1) * product.sum_k),
                                            &block.weights[p], block.begin, [] {});
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
    if (block.end < product.k) return;
    const int64_t row = row_tile * kTileRows;
    product.store_rows(sink, row, smaller(kTileRows, rows - row), block.panel + p, results);
  }

  // Sums of groups, which are scaled in registers.
  template <int kPanels>
  void multiply_groups(const TileResults<Product>& to, const WeightBlock& block, int64_t row_tile) const {
    float* results[kPanels];
    for (int p = 0; p < kPanels; p++) results[p] = to.result[row_tile * to.width + block.column + p];
    product.template multiply_groups<kPanels>(row_tile, block, results);
    const int64_t row = row_tile * kTileRows;
    for (int p = 0; block.end == product.k && p < kPanels; p++)
      product.store_rows(sink, row, smaller(kTileRows, rows - row), block.panel + p, results[p]);
  }

  struct Arrays {
    TileResults<Product> to;
    uint8_t* room;
    SumScale* scales;
  };
  Arrays arrays(Arena& arena, int64_t strip) const {
    using Results = TileResults<Product>;
    const int64_t tiles = ceil_div(rows, kTileRows) * strip;
    const bool goes_on = smaller(product.k, int64_t{product.block_k}) % product.sum_k != 0;
    return {{.result = arena.array<typename Results::Tile>(tiles),
             .open = goes_on ? arena.array<typename Results::SumTile>(tiles) : nullptr,
             .width = strip},
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
