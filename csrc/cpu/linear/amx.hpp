// SPDX-License-Identifier: Apache-2.0
// The integer products of dot.hpp by the tile unit: 16 rows of int8 activations times 16 columns of codes. The packed
// layout is that of a tile (16 columns x 4 k to a row of 64 bytes), so int8 codes are read where they lie; int4 codes
// are unpacked into scratch first, once for all rows of a block. The sums are exact and the float steps those of
// dot.hpp: the bits of every other instruction set.
#pragma once

#include "cpu/linear/dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileSums = kTileRows * kPanelColumns;
constexpr int64_t kRowPair = 2 * kTileRows;
constexpr int64_t kTileL2 = 1 << 20;  // of activations: half of the L2 of every processor with the unit

// The rows of a pass, and where the codes of one panel lie, 1024 bytes per 64 k.
struct TileRows {
  const LinearArgs& args;
  Int8Rows<int8_t> rows;
  int64_t first, count;  // rows first .. first + count of the call
};

// Rows that the pass does not have are computed (a tile always has 16) and not stored.
LOWBIT_INLINE void finish_row(const TileRows& pass, int64_t row, int64_t panel, f32x16 result) {
  if (row < pass.count)
    finish(pass.args, pass.first + row, panel, result,
           pass.rows.offset ? pass.rows.offset - pass.first : nullptr);
}

// Row i of a tile of sums. int8 codes are multiplied unsigned; `start` takes the offset off again.
template <Format kFormat>
LOWBIT_INLINE i32x16 exact_sum(const int32_t* sums, int i, const RowSum& sum) {
  const i32x16 total = load_i32(sums + i * kPanelColumns);
  return DotOf<kFormat>::kOffset ? add(total, set1(sum.start)) : total;
}

// One sum over all of k, no groups: kRowTiles x kPanels tiles of sums stay in the unit.
template <Format kFormat, int kRowTiles, int kPanels>
void multiply_whole(const TileRows& pass, int64_t row, int64_t panel, const uint8_t* const* codes) {
  const WeightSpec& spec = pass.args.weight_spec;
  const int64_t stride = pass.rows.code_stride;
  const int8_t* a = pass.rows.codes + row * stride;
  TileUnit::before_loads();
  unroll<kRowTiles * kPanels>([](auto c) { TileUnit::zero<c>(); });
  for (int64_t k = 0; k < spec.padded_k(); k += kTileK) {
    unroll<kRowTiles>([&](auto r) {
      TileUnit::load<TileUnit::kActivations + r>(a + r * kTileRows * stride + k, stride);
    });
    unroll<kPanels>([&](auto p) { TileUnit::load<TileUnit::kWeights + p>(codes[p] + k * kPanelColumns, 64); });
    unroll<kRowTiles * kPanels>([](auto c) {
      TileUnit::add_products<c, TileUnit::kActivations + c / kPanels, TileUnit::kWeights + c % kPanels>();
    });
  }
  alignas(64) int32_t sums[kRowTiles * kPanels][kTileSums];
  unroll<kRowTiles * kPanels>([&](auto c) { TileUnit::store<c>(sums[c]); });
  for (int c = 0; c < kRowTiles * kPanels; c++) {
    const PanelView view = view_panel(spec, pass.args.weight, panel + c % kPanels);
    const f32x16 w_scale = scale_of(view, 0), w_zero = sub(zero_of<kFormat>(view, 0), set1(kValueZero<kFormat>));
    for (int i = 0; i < kTileRows; i++) {
      const int64_t at = row + c / kPanels * kTileRows + i;
      const RowSum& sum = pass.rows.sums[at];
      finish_row(pass, at, panel + c % kPanels,
                 add_sum(set1(0.0f), exact_sum<kFormat>(sums[c], i, sum), sum, w_scale, view.zero ? &w_zero : nullptr));
    }
  }
}

// A sum per group (or piece of k): while the unit makes the next one, the last is scaled and added to 16 rows of
// results in registers.
template <Format kFormat, bool kAsymmetric>
void multiply_sums(const TileRows& pass, int64_t row, int64_t panel, const uint8_t* codes, int64_t step) {
  const WeightSpec& spec = pass.args.weight_spec;
  const int64_t stride = pass.rows.code_stride, padded = spec.padded_k(), sum_k = Sums(spec).k;
  const PanelView view = view_panel(spec, pass.args.weight, panel);
  const int8_t* a = pass.rows.codes + row * stride;
  const RowSum* row_sums = pass.rows.sums + row * pass.rows.sum_count;  // [sums][16]
  alignas(64) int32_t sums[2][kTileSums];
  f32x16 result[kTileRows];
  unroll<kTileRows>([&](auto i) { result[i] = set1(0.0f); });

  TileUnit::before_loads();
  const auto multiply = [&](auto half, int64_t s) __attribute__((always_inline)) {
    TileUnit::zero<half>();
    for (int64_t k = s * sum_k, end = smaller(padded, k + sum_k); k < end; k += step) {
      TileUnit::load<TileUnit::kActivations + half>(a + k, stride);
      TileUnit::load<TileUnit::kWeights + half>(codes + k * kPanelColumns, 64);
      TileUnit::add_products<half, TileUnit::kActivations + half, TileUnit::kWeights + half>();
    }
  };
  const auto take = [&](const int32_t* made, int64_t s) __attribute__((always_inline)) {
    const int64_t g = spec.group_size ? s : 0;
    const f32x16 w_scale = scale_of(view, g), w_zero = sub(zero_of<kFormat>(view, g), set1(kValueZero<kFormat>));
    unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
      const RowSum& sum = row_sums[s * kTileRows + i];
      result[i] = add_sum(result[i], exact_sum<kFormat>(made, i, sum), sum, w_scale, kAsymmetric ? &w_zero : nullptr);
    });
  };
  for (int64_t s = 0; s < pass.rows.sum_count; s += 2) {
    multiply(std::integral_constant<int, 0>{}, s);
    if (s) take(sums[1], s - 1);
    TileUnit::store<0>(sums[0]);
    if (s + 1 == pass.rows.sum_count) break;
    multiply(std::integral_constant<int, 1>{}, s + 1);
    take(sums[0], s);
    TileUnit::store<1>(sums[1]);
  }
  const int64_t last = pass.rows.sum_count - 1;
  take(sums[last % 2], last);
  unroll<kTileRows>([&](auto i) { finish_row(pass, row + i, panel, result[i]); });
}

// Two panels times rows row .. row + rows.
template <Format kFormat>
void multiply_panels(const TileRows& pass, int64_t row, int64_t row_end, int64_t panel, int count,
                     const uint8_t* const* codes, int64_t step) {
  if (pass.rows.sum_count > 1) {
    const auto multiply =
        pass.args.weight_spec.asymmetric ? multiply_sums<kFormat, true> : multiply_sums<kFormat, false>;
    for (; row < row_end; row += kTileRows)
      for (int p = 0; p < count; p++) multiply(pass, row, panel + p, codes[p], step);
    return;
  }
  for (; row < row_end; row += kRowPair)
    with_count<2>(row_end - row > kTileRows ? 2 : 1, [&](auto kRowTiles) {
      with_count<2>(count, [&](auto kPanels) { multiply_whole<kFormat, kRowTiles, kPanels>(pass, row, panel, codes); });
    });
}

// As linear_dot: rows in blocks that stay in L2 while the panels stream past.
template <Format kFormat>
void linear_amx(const LinearArgs& args) {
  using Dot = DotOf<kFormat>;
  using Codes = typename Dot::Codes;
  const WeightSpec& spec = args.weight_spec;
  const int64_t panels = spec.panels(), padded = spec.padded_k(), panel_codes = padded * kPanelColumns;
  const int64_t step = spec.group_size ? smaller(kTileK, spec.group_size) : kTileK;
  const int64_t block_rows = larger(kRowPair, kTileL2 / padded / kRowPair * kRowPair);
  constexpr int64_t kPass = 512;  // as in linear_dot
  for (int64_t first = 0; first < args.m; first += kPass) {
    const int64_t count = smaller(kPass, args.m - first), blocks = ceil_div(count, block_rows);
    const TileRows pass{args, quantize_rows<Dot>(args, first, count, kTileRows), first, count};
    const int threads = threads_for_products(args.m, spec);
    const int64_t chunk = panel_chunk(panels, threads, 2), chunks = ceil_div(panels, chunk);
    parallel_for(blocks * chunks, threads, [&](int64_t task) {
      const TileUnit unit(step);
      const int64_t row = task / chunks * block_rows, row_end = smaller(count, row + block_rows);
      const int64_t panel_end = smaller(panels, (task % chunks + 1) * chunk);
      uint8_t* unpacked =
          kFormat == Format::int4 ? static_cast<uint8_t*>(scratch(Scratch::task, 2 * panel_codes)) : nullptr;
      for (int64_t panel = task % chunks * chunk; panel < panel_end; panel += 2) {
        const int count_p = static_cast<int>(smaller(2, panel_end - panel));
        const uint8_t* codes[2] = {};
        for (int p = 0; p < count_p; p++) {
          const PanelView view = view_panel(spec, args.weight, panel + p);
          codes[p] = unpacked ? unpacked + p * panel_codes : view.codes;
          if (unpacked)
            expand_panel<kFormat>(view, padded / kHalfK, reinterpret_cast<Codes*>(unpacked + p * panel_codes));
        }
        multiply_panels<kFormat>(pass, row, row_end, panel, count_p, codes, step);
      }
    });
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
