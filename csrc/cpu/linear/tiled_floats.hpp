// SPDX-License-Identifier: Apache-2.0
// Float activations on the tile unit. It multiplies bfloat16, so a float is cut into parts of 8 bits that add up to it,
// x = x0 + x1 + x2: float32 exactly in 3, float16 in 2, integer codes in 1. The products of parts x_i * w_j with i + j
// < 3 are computed: the rest is below 2^-24 of a product, the rounding of a float32 FMA. Scales are applied to the
// sums, as in dot_tile.hpp.
#pragma once

#include "cpu/linear/float_parts.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// With fewer, vector products are as fast; they read a panel once per 8 rows (figures: docs/measured/linear.md).
LOWBIT_INLINE int64_t min_rows(const WeightSpec& spec, XFormat x_format, DType dtype) {
  const bool looked_up = looks_up_parts(spec), one_part = parts_of(spec.format) == 1;
  const bool bfloat16 = parts_of(x_format, dtype) == 1;
  if (looked_up && one_part) return bfloat16 ? 6 : 9;
  return bfloat16 && (looked_up || one_part) ? 9 : kMinRows;
}

// One loop for every format and number of parts: dispatch is negligible beside the products, 64 cycles per pair.
struct PartProduct {
  using Sum = float;
  static constexpr int64_t step = kPartK, tile_bytes = 64;
  const PackedWeight& weight;
  const XView& x;
  const PartTiles& rows;
  bool scaled;
  int x_parts, parts, code_max;
  // Two panels take up to two thirds of L1. If accumulators leave the registers at the end of a block, that pays.
  int64_t weight_bytes, sum_k, k, block_k;

  PartProduct(const PackedWeight& weight, const XView& x, const PartTiles& rows, bool scaled)
      : weight(weight), x(x), rows(rows), scaled(scaled), x_parts(parts_of(x.format, x.dtype)),
        parts(scaled ? 2 : parts_of(weight.spec.format)),
        code_max(lowbit::code_max(read_as(weight.spec.format))),
        weight_bytes(kPanelColumns * 2 * parts), sum_k(scaled ? weight.spec.padded_k() : weight.spec.group_k()),
        k(smaller(weight.spec.padded_k(), weight.spec.group_k() * weight.spec.groups())),
        block_k(TileUnit::kSumsInRegisters
                    ? 512
                    : equal_blocks(k, sum_k, TileUnit::kL1 / 3 / weight_bytes / kTileK * kTileK)) {}

  LOWBIT_INLINE int64_t row_bytes() const { return k / kPartK * x_parts * 64; }
  LOWBIT_INLINE bool long_sums() const { return sum_k >= block_k; }

  LOWBIT_INLINE const uint8_t* weights(int64_t panel, int64_t k, int64_t length, uint8_t* room) const {
    const WeightSpec& spec = weight.spec;
    const PanelView view = view_panel(spec, weight.data, panel);
    if (spec.format == Format::bfloat16 && TileUnit::kRowsTogether == 1)
      return view.codes + k / kTileK * spec.tile_bytes();
    with_format(spec.format, [&]<Format kFormat>() {
      if constexpr (!TileUnit::kSumsInRegisters && significant_bits(kFormat) + 11 <= 16)
        if (scaled) return cut_panel<read_as(kFormat), true>(spec, view, k, length, room);
      cut_panel<read_as(kFormat), false>(spec, view, k, length, room);
    });
    join_columns(room, round_up(length, kTileK) * weight_bytes);
    return room;
  }

  LOWBIT_INLINE bool sums_are_products() const { return sum_k <= kPartK && x_parts * parts == 1; }

  template <int kFirst, int kRowTiles, int kPanels, class Meanwhile>
  LOWBIT_INLINE void multiply(int64_t row_tile, int64_t begin, int64_t end, const uint8_t* const* weights,
                              int64_t block, Meanwhile&& meanwhile) const {
    const int64_t row_bytes = weight.spec.padded_k() / kPartK * x_parts * kPartTile, x_step = x_parts * kPartTile,
                  w_step = parts * kPartTile, from = (begin - block) / kPartK * w_step;
    const uint8_t* a = rows.tiles + row_tile * row_bytes + begin / kPartK * x_step;
    const auto x_at = [&](int r, int64_t at, int i) __attribute__((always_inline)) {
      return TileRows{a + r * row_bytes + at * x_step + i * kPartTile, 64, x_step};
    };
    const auto w_at = [&](int p, int64_t at, int j) __attribute__((always_inline)) {
      return TileRows{weights[p] + from + at * w_step + j * kPartTile, 64, w_step};
    };
    const int64_t steps = ceil_div(end - begin, kPartK);
    with_x_tiles(long_sums(), [&](auto x_tiles) __attribute__((always_inline)) {
      const auto add_parts = [&](int64_t steps, int64_t at, int i, int j, auto&& then) __attribute__((always_inline)) {
        multiply_steps<Sum, kFirst, kRowTiles, kPanels>(
            steps, [&](int r) { return x_tiles(x_at(r, at, i)); }, [&](int p) { return w_at(p, at, j); }, then);
      };
      if (x_parts * parts == 1) return add_parts(steps, 0, 0, 0, meanwhile);
      if (x_parts == 1 && parts == 2) {  // activations stay loaded for the second part of the weights
        for (int64_t step = 0; step < steps; step++) {
          const auto add = [&]<int kPart, Loads kLoads>() __attribute__((always_inline)) {
            multiply_tiles<Sum, kFirst, kRowTiles, kPanels, kLoads>([&](int r) { return x_tiles(x_at(r, step, 0)); },
                                                                    [&](int p) { return w_at(p, step, kPart).rows; });
          };
          add.template operator()<0, Loads::both>();
          add.template operator()<1, Loads::weights>();
          meanwhile();
        }
        return;
      }
      for (int64_t step = 0; step < steps; step++) {
        for (int j = 0; j < parts; j++)
          for (int i = 0; i < smaller(x_parts, kMaxParts - j); i++) add_parts(1, step, i, j, [] {});
        meanwhile();
      }
    });
  }

  template <class Unit = TileUnit> requires (Unit::kGroupsInRegisters)
  LOWBIT_INLINE bool groups_in_registers() const {
    return sum_k < k && block_k % sum_k == 0 && x_parts * parts == 1;
  }
  template <int kPanels, class Unit = TileUnit>
  LOWBIT_INLINE void multiply_groups(int64_t row_tile, const WeightBlock& block,
                                     float* const (&results)[kPanels]) const {
    const uint8_t* const a =
        rows.tiles + (row_tile * (weight.spec.padded_k() / kPartK) + block.begin / kPartK) * kPartTile;
    const OfRows of_rows = this->of_rows(row_tile, block.begin / sum_k);
    const auto multiply = [&](auto asymmetric) __attribute__((always_inline)) {
      Unit::template add_groups<kPanels>(
          results, TileRows{a, 64, kPartTile}, [&](int p) { return TileRows{block.weights[p], 64, kPartTile}; },
          ceil_div(block.end - block.begin, kPartK), sum_k / kPartK,
          [&](f32x16 total, int64_t g, int p, int64_t row, f32x16 result) __attribute__((always_inline)) {
            return of_rows.template add_total<asymmetric>(total, row, g, block.scales[p][g], result);
          });
    };
    if (weight.spec.asymmetric) multiply(std::true_type{});
    else multiply(std::false_type{});
  }

  LOWBIT_INLINE SumScale scale_of_sum(int64_t panel, int64_t g) const {
    if (scaled) return {set1(1.0f), set1(0.0f)};
    const PanelView view = view_panel(weight.spec, weight.data, panel);
    const f32x16 zero = zero_of<Format::int8>(view, g);  // for any format that has zero points
    return {scale_of(view, g), sub(whole_zero(view, zero, code_max), zero)};
  }

  // Sums of group g of 16 rows, and of the groups behind it.
  struct OfRows {
    const float *group_sums, *unscale;
    int64_t groups;
    bool asymmetric;
    template <bool kAsymmetric>
    LOWBIT_INLINE f32x16 add_total(f32x16 total, int64_t i, int64_t g, const SumScale& of, f32x16 result) const {
      if (kAsymmetric) total = fma(of.zero, set1(group_sums[i * groups + g]), total);
      return fma(total, of.scale, result);
    }
    template <bool kAsymmetric>
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      return add_total<kAsymmetric>(load(sums), i, 0, of, result);
    }
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      return asymmetric ? add<true>(sums, i, of, result) : add<false>(sums, i, of, result);
    }
    LOWBIT_INLINE f32x16 end(f32x16 value, const PanelEnd& end, int64_t row) const {
      value = mul(value, set1(unscale[row]));
      return end.scales ? mul(value, end.scale) : value;
    }
  };
  LOWBIT_INLINE OfRows of_rows(int64_t row_tile, int64_t g) const {
    const int64_t groups = weight.spec.groups();
    return {rows.group_sums + row_tile * kTileRows * groups + g, rows.unscale, groups, weight.spec.asymmetric};
  }
  // A row with inf or nan is stored too, but store_rest overwrites it.
  LOWBIT_INLINE bool only_scales(const Sink& sink) const { return only_stores(sink); }
  LOWBIT_INLINE void scale(const Sum* sums, int64_t row_tile, int64_t g, const SumScale& of, ResultRows& result) const {
    const OfRows of_rows = this->of_rows(row_tile, g);
    const auto scale_rows = [&](auto asymmetric) __attribute__((always_inline)) {
      unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
        result.row[i] = of_rows.template add<asymmetric>(sums + i * kPanelColumns, i, of, result.row[i]);
      });
    };
    if (weight.spec.asymmetric) scale_rows(std::true_type{});
    else scale_rows(std::false_type{});
  }

  LOWBIT_INLINE PanelEnd panel_end(const Sink& sink, int64_t panel) const {
    return PanelEnd(weight, sink, panel, false);
  }
  LOWBIT_INLINE void store_rows(const Sink& sink, int64_t row, int64_t count, int64_t panel,
                                const float* results) const {
    finish_rows(weight, sink.from(row), count, panel, results, kPanelColumns, rows.unscale + row, nullptr);
  }
  LOWBIT_INLINE void store_row(const Sink& sink, const PanelEnd& end, int64_t row, int64_t panel, f32x16 value) const {
    if (rows.unscale[row] != 0.0f)
      finish_row(sink, weight.spec.n, end, row, panel, mul(value, set1(rows.unscale[row])), nullptr);
  }

  // A row with inf or nan is computed as one of few rows: inf times a lower part of 0 would be nan.
  void store_rest(const Sink& sink, int64_t count, Span panels) const {
    for (int64_t row = 0; row < count; row++)
      if (rows.unscale[row] == 0.0f) [[unlikely]] multiply_alone(sink.from(row), row, panels);
  }

  void multiply_alone(const Sink& sink, int64_t row, Span panels) const {
    with_format(weight.spec.format, [&]<Format kFormat>() {
      constexpr Format kRead = read_as(kFormat);
      const WeightSpec& spec = weight.spec;
      Arena counted;
      OrderedRows(spec, 1, counted), counted.array<uint8_t>(unpacked_bytes<kRead>(spec));
      const Scratch memory(counted.bytes);
      Arena arena = memory.arena();
      const OrderedRows ordered(spec, 1, arena);
      uint8_t* const room = arena.array<uint8_t>(unpacked_bytes<kRead>(spec));
      order_rows<kRead>(x, spec, row, 1, ordered);
      for (int64_t panel = panels.begin; panel < panels.end; panel++)
        stream_panel<kRead, kStepK<kRead>, 1>(weight, readable_panel<kRead>(weight, panel, room), ordered, sink, 0,
                                              panel);
    });
  }
};

// The family of micro-kernels for floats on the tile unit.
struct PartedRows {
  static constexpr int64_t kPass = kTilePass;
  static constexpr PanelCut kCut = kTiledCut;

  XView x;
  int64_t count;
  bool scaled;
  PartTiles rows;

  PartedRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), scaled(scales_weights(spec, x.format, x.dtype, count)), rows(take(spec, arena)) {}

  int64_t pieces() const { return ceil_div(count, kTileRows); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    const int64_t padded = spec.padded_k();
    const int parts = parts_of(x.format, x.dtype);
    const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
    const Span range = piece_of(count, kTileRows, piece);
    for (int64_t row = range.begin; row < range.end; row++)
      cut_row(spec, widen_row(x, row, padded, buffer.as<float>()), parts, looks_up_parts(spec) && !scaled, rows, row);
    const int64_t tiles = padded / kPartK * parts;  // of 16 rows
    for (int64_t tile = range.begin / kTileRows * tiles, end = tile + tiles; tile < end; tile++)
      join_rows(rows.tiles + tile * kPartTile, 64, range.count(), 64);
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, kPass}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span, Span panels) const {
    multiply_by_tiles(PartProduct(weight, x, rows, scaled), sink, count, panels);
  }

 private:
  PartTiles take(const WeightSpec& spec, Arena& arena) const {
    const int64_t padded = round_up(count, kTileRows), bytes = parts_of(x.format, x.dtype) * kPartTile;
    return {.tiles = arena.array<uint8_t>(padded / kTileRows * (spec.padded_k() / kPartK) * bytes),
            .group_sums = arena.array<float>(spec.asymmetric ? padded * spec.groups() : 0),
            .unscale = arena.array<float>(count)};
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
