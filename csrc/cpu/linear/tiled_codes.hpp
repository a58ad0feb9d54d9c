// SPDX-License-Identifier: Apache-2.0
// The integer products of dot.hpp on the tile unit: 16 rows of int8 activations times 16 columns of codes. The packed
// layout is that of a tile (16 columns x 4 k per row of 64 bytes), so int8 codes are read in place; int4 codes are
// unpacked first, once for all rows of a pass. Sums are exact and the float operations those of dot.hpp: the bits of
// every other instruction set.
#pragma once

#include "cpu/linear/tiled.hpp"
#include "cpu/linear/dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
struct Int8Product {
  using Sum = int32_t;
  static constexpr int64_t block_k = 512, weight_bytes = kPanelColumns;  // 16 KiB for two panels, of an L1 of 48
  const PackedWeight& weight;
  const Int8Rows<int8_t>& rows;
  int64_t sum_k, k, step, tile_bytes;

  Int8Product(const PackedWeight& weight, const Int8Rows<int8_t>& rows)
      : weight(weight), rows(rows), sum_k(Sums(weight.spec).k),
        k(smaller(weight.spec.padded_k(), sum_k * rows.sum_count)), step(smaller(kTileK, sum_k)), tile_bytes(step) {}

  LOWBIT_INLINE const uint8_t* weights(int64_t panel, int64_t k, int64_t length, uint8_t* room) const {
    const WeightSpec& spec = weight.spec;
    PanelView view = view_panel(spec, weight.data, panel);
    if (kFormat == Format::int8) return readable_tiles<kFormat>(spec, view, k / kTileK, ceil_div(length, kTileK), room);
    view.codes += k / kTileK * spec.tile_bytes();
    expand_panel<kFormat>(spec, view, length / kHalfK, reinterpret_cast<typename DotOf<kFormat>::Codes*>(room));
    return room;
  }

  LOWBIT_INLINE bool sums_are_products() const { return sum_k <= step; }

  template <int kFirst, int kRowTiles, int kPanels>
  LOWBIT_INLINE void multiply(int64_t row_tile, int64_t begin, int64_t end, const uint8_t* const* weights,
                              int64_t block) const {
    const int8_t* a = rows.codes + row_tile * kTileRows * rows.code_stride + begin;
    multiply_steps<Sum, kFirst, kRowTiles, kPanels>(
        ceil_div(end - begin, step),
        [&](int r) { return TileRows{a + r * kTileRows * rows.code_stride, rows.code_stride, step}; },
        [&](int p) { return TileRows{weights[p] + (begin - block) * kPanelColumns, 64, step * kPanelColumns}; });
  }

  LOWBIT_INLINE SumScale scale_of_sum(int64_t panel, int64_t s) const {
    const PanelView view = view_panel(weight.spec, weight.data, panel);
    const int64_t g = weight.spec.group_size ? s : 0;
    return {scale_of(view, g), sub(zero_of<kFormat>(view, g), set1(value_zero<kFormat>(view)))};
  }

  LOWBIT_INLINE void scale(const Sum* sums, int64_t row_tile, int64_t s, const SumScale& of, ResultRows& result) const {
    const RowSum* row_sums = rows.sums + (row_tile * rows.sum_count + s) * kTileRows;
    const auto scale_rows = [&](auto asymmetric) __attribute__((always_inline)) {
      unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
        i32x16 total = load_i32(sums + i * kPanelColumns);
        // int8 codes are multiplied unsigned; `start` subtracts the offset
        if (DotOf<kFormat>::kOffset) total = add(total, set1(row_sums[i].start));
        result.row[i] = add_sum<kFormat>(result.row[i], total, row_sums[i], of.scale, asymmetric ? &of.zero : nullptr);
      });
    };
    if (weight.spec.asymmetric) scale_rows(std::true_type{});
    else scale_rows(std::false_type{});
  }

  LOWBIT_INLINE void store_rows(const Sink& sink, int64_t row, int64_t count, int64_t panel,
                                const float* results) const {
    finish_rows(weight, sink.from(row), count, panel, results, nullptr, rows.offset ? rows.offset + row : nullptr);
  }
  void store_rest(const Sink&, int64_t, Span) const {}
};

// The family of micro-kernels for int8 codes on the tile unit.
template <Format kFormat>
struct TiledCodeRows {
  static constexpr int64_t kPass = kTilePass, kPiece = 8;
  static constexpr PanelCut kCut = kTiledCut;

  XView x;
  int64_t count;
  Int8Rows<int8_t> rows;

  TiledCodeRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), rows(take_rows<int8_t>(spec, x.format, round_up(count, kTileRows), kTileRows, arena)) {}

  int64_t pieces() const { return ceil_div(count, kPiece); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    quantize_rows<DotOf<kFormat>>(x, spec, rows, piece_of(count, kPiece, piece));
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, kPass}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span, Span panels) const {
    multiply_by_tiles(Int8Product<kFormat>(weight, rows), sink, count, panels);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
