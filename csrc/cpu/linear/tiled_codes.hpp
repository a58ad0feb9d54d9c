// SPDX-License-Identifier: Apache-2.0
// The integer products of dot.hpp by the tile unit: 16 rows of int8 activations times 16 columns of codes. The packed
// layout is that of a tile (16 columns x 4 k to a row of 64 bytes), so int8 codes are read where they lie; int4 codes
// are unpacked first, once for all rows of a pass. The sums are exact and the float steps those of dot.hpp: the bits of
// every other instruction set.
#pragma once

#include "cpu/linear/tiled.hpp"
#include "cpu/linear/dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
struct Int8Product {
  using Sum = int32_t;
  static constexpr int64_t block_k = 512, weight_bytes = kPanelColumns;  // of two panels 16 KiB, of an L1 of 48
  const LinearArgs& args;
  Int8Rows<int8_t> rows;
  int64_t first, sum_k, k, step, tile_bytes;

  Int8Product(const LinearArgs& args, int64_t first, int64_t count)
      : args(args), rows(quantize_rows<DotOf<kFormat>>(args, first, count, kTileRows)), first(first),
        sum_k(Sums(args.weight_spec).k), k(smaller(args.weight_spec.padded_k(), sum_k * rows.sum_count)),
        step(smaller(kTileK, sum_k)), tile_bytes(step) {}

  LOWBIT_INLINE const uint8_t* weights(int64_t panel, int64_t k, int64_t length, uint8_t* room) const {
    const WeightSpec& spec = args.weight_spec;
    PanelView view = view_panel(spec, args.weight, panel);
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
    const PanelView view = view_panel(args.weight_spec, args.weight, panel);
    const int64_t g = args.weight_spec.group_size ? s : 0;
    return {scale_of(view, g), sub(zero_of<kFormat>(view, g), set1(value_zero<kFormat>(view)))};
  }

  LOWBIT_INLINE void scale(const Sum* sums, int64_t row_tile, int64_t s, const SumScale& of, ResultRows& result) const {
    const RowSum* row_sums = rows.sums + (row_tile * rows.sum_count + s) * kTileRows;
    const auto scale_rows = [&](auto asymmetric) __attribute__((always_inline)) {
      unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
        i32x16 total = load_i32(sums + i * kPanelColumns);
        // int8 codes are multiplied unsigned; `start` takes the offset off again
        if (DotOf<kFormat>::kOffset) total = add(total, set1(row_sums[i].start));
        result.row[i] = add_sum<kFormat>(result.row[i], total, row_sums[i], of.scale, asymmetric ? &of.zero : nullptr);
      });
    };
    if (args.weight_spec.asymmetric) scale_rows(std::true_type{});
    else scale_rows(std::false_type{});
  }

  LOWBIT_INLINE void store_rows(int64_t row, int64_t count, int64_t panel, const float* results) const {
    finish_rows(args, first + row, count, panel, results, nullptr, rows.offset ? rows.offset - first : nullptr);
  }
  void store_rest(int64_t) const {}
};

template <Format kFormat>
void linear_tiled_codes(const LinearArgs& args) {
  linear_tiles(args, [&](int64_t first, int64_t count) { return Int8Product<kFormat>(args, first, count); });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
