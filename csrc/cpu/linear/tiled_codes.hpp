// SPDX-License-Identifier: Apache-2.0
// The integer products of dot_tile.hpp on the tile unit: 16 rows of int8 activations times 16 columns of codes. The
// packed layout is that of a tile (16 columns x 4 k per row of 64 bytes), so int8 codes are read in place; int4 codes
// are unpacked first, once for all rows of a pass, and so are all codes where the unit has them joined (tiles.hpp).
// Sums are exact and the float operations those of dot_tile.hpp: the bits of every other instruction set.
#pragma once

#include "cpu/linear/tiled.hpp"
#include "cpu/linear/dot_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
struct Int8Product {
  using Sum = int32_t;
  static constexpr int64_t weight_bytes = kPanelColumns;  // 32 KiB for two panels, of an L1 of 48
  const PackedWeight& weight;
  const Int8Rows<int8_t>& rows;
  int64_t sum_k, k, block_k, step, tile_bytes;

  Int8Product(const PackedWeight& weight, const Int8Rows<int8_t>& rows)
      : weight(weight), rows(rows), sum_k(Sums(weight.spec).k),
        k(smaller(weight.spec.padded_k(), sum_k * rows.sum_count)), block_k(equal_blocks(k, sum_k, kMaxBlockK)),
        step(smaller(kTileK, sum_k)), tile_bytes(step) {}

  LOWBIT_INLINE int64_t row_bytes() const { return k; }
  LOWBIT_INLINE bool long_sums() const { return sum_k >= block_k; }

  LOWBIT_INLINE const uint8_t* weights(int64_t panel, int64_t k, int64_t length, uint8_t* room) const {
    const WeightSpec& spec = weight.spec;
    PanelView view = view_panel(spec, weight.data, panel);
    if (kFormat == Format::int8 && TileUnit::kRowsTogether == 1)
      return readable_tiles<kFormat>(spec, view, k / kTileK, ceil_div(length, kTileK), room);
    view.codes += k / kTileK * spec.tile_bytes();
    expand_panel<kFormat>(spec, view, length / kHalfK, reinterpret_cast<typename DotOf<kFormat>::Codes*>(room));
    join_columns(room, length * kPanelColumns);
    return room;
  }

  LOWBIT_INLINE bool sums_are_products() const { return sum_k <= step; }

  template <int kFirst, int kRowTiles, int kPanels, class Meanwhile>
  LOWBIT_INLINE void multiply(int64_t row_tile, int64_t begin, int64_t end, const uint8_t* const* weights,
                              int64_t block, Meanwhile&& meanwhile) const {
    constexpr int64_t kTogether = TileUnit::kRowsTogether;
    const int8_t* a = rows.codes + row_tile * kTileRows * rows.code_stride + begin * kTogether;
    with_x_tiles(long_sums(), [&](auto x_tiles) __attribute__((always_inline)) {
      multiply_steps<Sum, kFirst, kRowTiles, kPanels>(
          ceil_div(end - begin, step),
          [&](int r) {
            return x_tiles(TileRows{a + r * kTileRows * rows.code_stride, rows.code_stride, step * kTogether});
          },
          [&](int p) { return TileRows{weights[p] + (begin - block) * kPanelColumns, 64, step * kPanelColumns}; },
          meanwhile);
    });
  }

  LOWBIT_INLINE SumScale scale_of_sum(int64_t panel, int64_t s) const {
    const PanelView view = view_panel(weight.spec, weight.data, panel);
    const int64_t g = weight.spec.group_size ? s : 0;
    return {scale_of(view, g), sub(zero_of<kFormat>(view, g), set1(value_zero<kFormat>(view)))};
  }

  // Sums number s of 16 rows.
  struct OfRows {
    const RowSum* rows;
    bool asymmetric;
    template <bool kAsymmetric>
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      i32x16 total = load_i32(sums);
      // codes are multiplied plus an offset, which `start` subtracts
      if (DotOf<kFormat>::kOffset) total = cpu::LOWBIT_ISA_NAME::add(total, set1(rows[i].start));
      return add_sum<kFormat>(result, total, rows[i], of.scale, kAsymmetric ? &of.zero : nullptr);
    }
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      return asymmetric ? add<true>(sums, i, of, result) : add<false>(sums, i, of, result);
    }
    LOWBIT_INLINE static f32x16 end(f32x16 value, const PanelEnd& end, int64_t) { return mul(value, end.scale); }
  };
  LOWBIT_INLINE OfRows of_rows(int64_t row_tile, int64_t s) const {
    return {rows.sums + (row_tile * rows.sum_count + s) * kTileRows, weight.spec.asymmetric};
  }
  LOWBIT_INLINE bool only_scales(const Sink& sink) const { return !rows.offset && only_stores(sink); }
  LOWBIT_INLINE void scale(const Sum* sums, int64_t row_tile, int64_t s, const SumScale& of, ResultRows& result) const {
    const OfRows of_rows = this->of_rows(row_tile, s);
    const auto scale_rows = [&](auto asymmetric) __attribute__((always_inline)) {
      unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
        result.row[i] = of_rows.template add<asymmetric>(sums + i * kPanelColumns, i, of, result.row[i]);
      });
    };
    if (weight.spec.asymmetric) scale_rows(std::true_type{});
    else scale_rows(std::false_type{});
  }

  LOWBIT_INLINE PanelEnd panel_end(const Sink& sink, int64_t panel) const {
    return PanelEnd(weight, sink, panel, rows.offset != nullptr);
  }
  LOWBIT_INLINE void store_rows(const Sink& sink, int64_t row, int64_t count, int64_t panel,
                                const float* results) const {
    finish_rows(weight, sink.from(row), count, panel, results, kPanelColumns, nullptr, rows.offsets_from(row));
  }
  LOWBIT_INLINE void store_row(const Sink& sink, const PanelEnd& end, int64_t row, int64_t panel, f32x16 value) const {
    finish_row(sink, weight.spec.n, end, row, panel, value, rows.offset);
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
    const Span range = piece_of(count, kPiece, piece);
    quantize_rows<DotOf<kFormat>>(x, spec, rows, range);
    join_rows(rows.codes + range.begin * rows.code_stride, rows.code_stride, range.count(), spec.padded_k());
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, kPass}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span, Span panels) const {
    multiply_by_tiles(Int8Product<kFormat>(weight, rows), sink, count, panels);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
