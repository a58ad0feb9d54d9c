// SPDX-License-Identifier: Apache-2.0
// Few rows of int8 activations times a 2:4 weight (formats/int8_semi_sparse.hpp) as stored: instead of moving codes to
// their activations, activations are shuffled to the codes. A step of 8 k and 16 columns:
//
//   activations   a0 a1 a2 a3  a4 a5 a6 a7     the same for each column
//   positions      1  3         0  2           + 4 in the second half
//   picked        a1 a3        a4 a6           one shuffle within each 8 bytes
//   codes         c0 c1        c2 c3           64 bytes, for 128 weights
//
// Besides the shuffle and the product, which are once per row, a step has two operations to compute positions, and one
// for the sum of the codes if activations are unsigned. Dense int8 takes two products of 64 bytes, so the time of one
// row is bound by memory: 0.625 of the bytes. Dot products are exact and the float operations those of dot_tile.hpp.
#pragma once

#include "cpu/linear/dot_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int kSemiSparseRows = smaller(4, kDotRows);

template <int kRows>
struct SemiSparseSums {
  static constexpr int kChains = kRows <= 2 ? 2 : 1;  // latency of a product: 5 cycles; a step of one row: 3
  i32x16 dot[kChains][kRows], offset[kChains];
  LOWBIT_INLINE SemiSparseSums() {
    for (int chain = 0; chain < kChains; chain++) {
      offset[chain] = set1(int32_t{0});
      for (i32x16& sum : dot[chain]) sum = set1(int32_t{0});
    }
  }
  LOWBIT_INLINE i32x16 total(int r) const {
    i32x16 sum = sub(dot[0][r], offset[0]);
    for (int chain = 1; chain < kChains; chain++) sum = add(sum, sub(dot[chain][r], offset[chain]));
    return sum;
  }
};

// Adds half a tile, 32 k from `k` on.
template <bool kHigh, int kRows>
LOWBIT_INLINE void semi_sparse_half(const PanelView& panel, int64_t k, const int8_t* const* a, Ahead& next,
                                    SemiSparseSums<kRows>& sums) {
  using Codec = codec_of<Format::int8_semi_sparse>;
  using Dot = Dot8SemiSparse;
  constexpr int64_t kTileBytes = kByteTile * Codec::stored_bits / 8;
  constexpr int kSteps = kHalfK / Codec::k_of_step, kLines = 6;  // 12 lines of 10: each of four streams has whole ones
  const uint8_t* tile = panel.codes + k / kTileK * kTileBytes;
  for (int line = 0; line < kLines; line++) next.fetch(line + kHigh * kLines);
  unroll<kSteps>([&](auto i) __attribute__((always_inline)) {
    constexpr int kStep = i + kHigh * kSteps, kChain = i % SemiSparseSums<kRows>::kChains;
    const i32x16 row = load_i32(reinterpret_cast<const int32_t*>(tile + kStep % 2 * 64)),
                 in_four = bit_and(shift_right<kStep / 2 * 2>(row), set1(int32_t{0x03030303})),
                 positions = bit_or(in_four, set1(int32_t{0x04040000}));
    const u8x64 codes = load_codes(tile + Codec::codes_at + kStep * 64);
    sums.offset[kChain] = Dot::offset(sums.offset[kChain], codes);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; r++)
      sums.dot[kChain][r] = Dot::step(sums.dot[kChain][r], codes, positions, a[r] + k + i * Codec::k_of_step);
  });
  if constexpr (kHigh) next.advance(panel, kTileBytes);
}

// Rows row..row+kRows of the prepared activations times one panel.
template <int kRows>
void semi_sparse_tile(const PackedWeight& weight, const Int8Rows<int8_t>& rows, const Sink& sink, int64_t row,
                      int64_t panel) {
  const WeightSpec& spec = weight.spec;
  const PanelView view = view_panel(spec, weight.data, panel);
  Ahead next(spec, view, view.end, reads_in_streams());
  const int8_t* a[kRows];
  f32x16 result[kRows];
  for (int r = 0; r < kRows; r++) a[r] = rows.codes + (row + r) * rows.code_stride, result[r] = set1(0.0f);
  const int64_t halves = ceil_div(spec.k, kHalfK), halves_per_sum = Sums(spec).k / kHalfK;
  for (int64_t s = 0, half = 0; half < halves; s++) {
    SemiSparseSums<kRows> sums;
    for (const int64_t end = smaller(halves, half + halves_per_sum); half < end; half++) {
      if (half % 2) semi_sparse_half<true>(view, half * kHalfK, a, next, sums);
      else semi_sparse_half<false>(view, half * kHalfK, a, next, sums);
    }
    const int64_t g = spec.group_size ? s : 0;
    const f32x16 w_scale = scale_of(view, g);
    next.fetch_group(view, g);
    for (int r = 0; r < kRows; r++)
      result[r] = add_sum<Format::int8>(result[r], sums.total(r), rows.sums[(row + r) * rows.sum_count + s], w_scale,
                                        nullptr);
  }
  finish_tile(weight, sink, row, kRows, panel, result, 1, rows.offsets_from(row));
}

// The family of micro-kernels for int8 codes and few rows.
struct SemiSparseRows {
  using Dot = Dot8SemiSparse;
  static constexpr int64_t kPass = kExpandRows, kPiece = 8;
  static constexpr PanelCut kCut{.at_once = 1};

  XView x;
  int64_t count;
  Int8Rows<int8_t> rows;

  SemiSparseRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), rows(take_rows<int8_t>(spec, x.format, count, 1, arena)) {}

  int64_t pieces() const { return ceil_div(count, kPiece); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    const Span range = piece_of(count, kPiece, piece);
    quantize_rows<Dot>(x, spec, rows, range);
    for (int64_t at = range.begin * rows.code_stride; Dot::kOffset && at < range.end * rows.code_stride; at++)
      rows.codes[at] = static_cast<int8_t>(rows.codes[at] + Dot::kOffset);
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, count}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    const RowTiles tiles(block.count(), kSemiSparseRows);
    for (int64_t panel = panels.begin; panel < panels.end; panel++)
      for (int64_t tile = 0; tile < tiles.count; tile++)
        with_count<kSemiSparseRows>(tiles.height(tile), [&](auto kRows) {
          semi_sparse_tile<kRows>(weight, rows, sink, block.begin + tiles.begin(tile), panel);
        });
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
