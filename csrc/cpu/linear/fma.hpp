// SPDX-License-Identifier: Apache-2.0
// Float micro-kernels, accumulating in float32, for every weight format with float activations. Two variants, chosen by
// the number of rows:
//   few rows: each weight is converted in registers and used at once (StreamRows): memory speed at m = 1;
//   many:     a block of k of a panel is converted to float32 in L1 and multiplied as a dense matrix (BlockedRows).
#pragma once

#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// ---- few rows ------------------------------------------------------------------------------------------------------

// The factor common to all values is applied at the end: activations multiplied by it might overflow.
template <Format kFormat>
constexpr float kLate = unshift_of<kFormat>(0) > 1.0f ? unshift_of<kFormat>(0) : 1.0f;

// Activations in the order in which the halves are read, each times 2^-shift unless kLate, and their sums per group
// (the factors of the zero points).
struct OrderedRows {
  int64_t stride, groups;
  float* values;      // [rows][stride]
  float* group_sums;  // [rows][groups]

  OrderedRows(const WeightSpec& spec, int64_t count, Arena& arena)
      : stride(spec.padded_k() + 16), groups(spec.groups()), values(arena.array<float>(count * stride)),
        group_sums(arena.array<float>(count * groups)) {}
};

// Rows first .. first + count of x become the first rows of `rows`.
template <Format kFormat>
void order_rows(const XView& view, const WeightSpec& spec, int64_t first, int64_t count, const OrderedRows& rows) {
  const int64_t padded = spec.padded_k(), groups = spec.groups();
  const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
  for (int64_t row = 0; row < count; row++) {
    const float* x = widen_row(view, first + row, padded, buffer.as<float>());
    float* out = rows.values + row * rows.stride;
    // int4: byte i of a column's four bytes carries 2^(8 i), the high nibbles another 2^4.
    for (int64_t k = 0; k < padded; k += 4)
      unroll<4>([&](auto i) {
        constexpr float kLow = unshift_of<kFormat>(2 * i) / kLate<kFormat>,
                        kHigh = unshift_of<kFormat>(2 * i + 1) / kLate<kFormat>;
        out[k + i] = x[k + i] * (k % kTileK < kHalfK ? kLow : kHigh);
      });
    for (int64_t g = 0; g < groups; g++) rows.group_sums[row * groups + g] = group_sum(spec, x, g);
  }
}

// Accumulators of one group, kChains independent ones per row: an FMA has a latency of 4 cycles and a throughput of two
// per cycle.
template <int kRows>
struct StreamSums {
  static constexpr int kChains = kRows >= kStreamRows ? 1 : kRows * 2 >= kStreamRows ? 2 : 4;
  f32x16 chain[kChains][kRows];
  LOWBIT_INLINE StreamSums() {
    for (auto& sums : chain)
      for (f32x16& sum : sums) sum = set1(0.0f);
  }
  LOWBIT_INLINE f32x16 total(int r) const {
    f32x16 sum = chain[0][r];
    for (int c = 1; c < kChains; c++) sum = add(sum, chain[c][r]);
    return sum;
  }
};

// Adds step number `step`, kStep k, of a panel. Values of int4 alternate between the halves of a tile, those of other
// formats are in order.
template <Format kFormat, int64_t kStep, int kRows>
LOWBIT_INLINE void stream_step(const PanelView& panel, bool mostly_plain, const float* const* x, int64_t step,
                               Ahead& next, StreamSums<kRows>& sums) {
  using U = Unit<kFormat>;
  constexpr bool kInt4 = bits(kFormat) == 4;
  constexpr int kValues = kInt4 ? U::kValues / 2 : U::kValues, kUnits = kStep / kValues;
  const int64_t k = step * kStep, half = k / kHalfK;
  const uint8_t* codes =
      panel.codes + ((kInt4 ? half / 2 : half) * kHalfK + k % kHalfK) / kValues * U::kBytes;
  constexpr int kTogether =
      kValues == 1 ? 4 : 1;  // units at a time, so that the accumulator of each value is a constant
  auto run = [&](auto high) {
    for (int64_t unit = 0; unit < kUnits; unit += kTogether) {
      for (int64_t at = 0; !high && at < kTogether * U::kBytes; at += 64) next.fetch((unit * U::kBytes + at) / 64);
      const uint8_t* from = codes + unit * U::kBytes;
      U::with_plain(from, mostly_plain, [&](auto plain) {
        unroll<kTogether * kValues>([&](auto i) {
          constexpr int kValue = i % kValues, kUnit = i / kValues;
          const f32x16 w = U::template value<kInt4 ? 2 * kValue + high : kValue, plain>(from + kUnit * U::kBytes);
          const int64_t at = k + unit * kValues + i;
          f32x16* chain = sums.chain[i % StreamSums<kRows>::kChains];
#pragma GCC unroll 8
          for (int r = 0; r < kRows; r++) chain[r] = fma(w, set1(x[r][at]), chain[r]);
        });
      });
    }
    if constexpr (!high) next.advance(panel, kUnits * U::kBytes);
  };
  if (kInt4 && half % 2) run(std::true_type{});
  else run(std::false_type{});
}

template <Format kFormat, int64_t kStep, int kRows>
void stream_panel(const PackedWeight& weight, const PanelView& view, const OrderedRows& rows, const Sink& sink,
                  int64_t row, int64_t panel) {
  const WeightSpec& spec = weight.spec;
  Ahead next(spec, view, view.end, in_four_streams<kFormat>(spec, kStreamFour));
  const bool mostly_plain = Unit<kFormat>::mostly_plain(view.codes);
  const float *x[kRows], *group_sums[kRows];
  for (int r = 0; r < kRows; r++) {
    x[r] = rows.values + (row + r) * rows.stride;
    group_sums[r] = rows.group_sums + (row + r) * rows.groups;
  }
  f32x16 result[kRows];
  for (int r = 0; r < kRows; r++) result[r] = set1(0.0f);
  const int64_t steps = ceil_div(spec.k, kStep),
                steps_per_group = spec.group_size ? spec.group_size / kStep : steps;
  for (int64_t g = 0, step = 0; step < steps; g++) {
    StreamSums<kRows> sums;
    for (const int64_t end = smaller(steps, step + steps_per_group); step < end; step++)
      stream_step<kFormat, kStep, kRows>(view, mostly_plain, x, step, next, sums);
    if constexpr (is_float(kFormat)) {
      for (int r = 0; r < kRows; r++) result[r] = sums.total(r);
    } else {  // result += w_scale * (sum of value * x - zero * sum of x)
      next.fetch_group(view, g);
      const f32x16 w_scale = mul(scale_of(view, g), set1(kLate<kFormat>)),
                   w_zero = sub(set1(value_zero<kFormat>(view)), zero_of<kFormat>(view, g));
      for (int r = 0; r < kRows; r++)
        result[r] = fma(fma(w_zero, set1(group_sums[r][g]), sums.total(r)), w_scale, result[r]);
    }
  }
  finish_tile(weight, sink, row, kRows, panel, result, 1, nullptr);
}

// Bytes for unpacking codes in planes, once for all rows; 0 if a panel is read as stored.
template <Format kFormat>
LOWBIT_INLINE int64_t unpacked_bytes(const WeightSpec& spec) {
  return kFormat == Format::int8 && is_unpacked(spec.format) ? spec.tiles() * kByteTile : 0;
}

// A panel in readable form, with its unpacked codes in `room`.
template <Format kFormat>
LOWBIT_INLINE PanelView readable_panel(const PackedWeight& weight, int64_t panel, uint8_t* room) {
  const WeightSpec& spec = weight.spec;
  PanelView view = view_panel(spec, weight.data, panel);
  const int64_t bytes = unpacked_bytes<kFormat>(spec);
  if (bytes) view.codes = readable_tiles<kFormat>(spec, view, 0, spec.tiles(), room), view.end = room + bytes;
  return view;
}

// The family of micro-kernels for few rows.
template <Format kFormat>
struct StreamRows {
  static constexpr int64_t kPass = 2 * kStreamRows;  // with more rows, converting once pays
  static constexpr PanelCut kCut{.at_once = 1};

  XView x;
  int64_t count;
  OrderedRows rows;

  StreamRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), rows(spec, count, arena) {}

  int64_t pieces() const { return 1; }
  void prepare(const WeightSpec& spec, int64_t) const { order_rows<kFormat>(x, spec, 0, count, rows); }

  RowBlocks blocks(const WeightSpec&) const { return {count, count}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    const RowTiles tiles(block.count(), kStreamRows);
    const Scratch room(unpacked_bytes<kFormat>(weight.spec));
    for (int64_t panel = panels.begin; panel < panels.end; panel++) {
      const PanelView view = readable_panel<kFormat>(weight, panel, room.as<uint8_t>());
      for (int64_t tile = 0; tile < tiles.count; tile++)
        with_count<kStreamRows>(tiles.height(tile), [&](auto kRows) {
          with_step<kFormat>(weight.spec, [&](auto kStep) {
            stream_panel<kFormat, kStep, kRows>(weight, view, rows, sink, block.begin + tiles.begin(tile), panel);
          });
        });
    }
  }
};

// ---- many rows -----------------------------------------------------------------------------------------------------

constexpr int64_t kBlockK = 256;  // a panel's block is 16 KiB of float32: half of L1

// c[panel][row] (+)= sum over k of a[k][row] * b[panel][k].
template <int kRows, int kPanels>
[[gnu::noinline]] void float_tile(const float* a, const float* b, int64_t b_stride, int64_t k, float* c,
                                  int64_t c_stride, bool first) {
  f32x16 acc[kRows][kPanels];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) acc[r][p] = first ? set1(0.0f) : load(c + p * c_stride + r * 16);
  for (int64_t i = 0; i < k; i++, a += kRows, b += 16) {
    f32x16 w[kPanels];
#pragma GCC unroll 4
    for (int p = 0; p < kPanels; p++) w[p] = load(b + p * b_stride);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++) {
      const f32x16 x = set1(a[r]);
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; p++) acc[r][p] = fma(x, w[p], acc[r][p]);
    }
  }
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) store(c + p * c_stride + r * 16, acc[r][p]);
}

// The family of micro-kernels for many rows and every format: a block of k is converted once for all rows of a block.
// Rows are interleaved by tile, as [k][rows in the tile].
struct BlockedRows {
  static constexpr int64_t kPass = 528, kBlock = 264;  // 264 rows x 256 k of float32 are 264 KiB of L2
  static constexpr PanelCut kCut{.at_once = kFloatPanels};
  static_assert(kBlock % kFloatRows == 0);

  XView x;
  int64_t count, padded_k, block_k;  // blocks of k of like length: a short one would only load and store sums
  float* values;

  BlockedRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), padded_k(spec.padded_k()),
        block_k(round_up(ceil_div(padded_k, ceil_div(padded_k, kBlockK)), kTileK)),
        values(arena.array<float>(count * padded_k)) {}

  RowBlocks blocks(const WeightSpec&) const { return {count, kBlock}; }

  // A piece is a register tile.
  int64_t pieces() const { return ceil_div(count, kFloatRows); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    const Span block = blocks(spec).at(piece / (kBlock / kFloatRows));
    const RowTiles tiles(block.count(), kFloatRows);
    const int64_t tile = piece % (kBlock / kFloatRows), first = block.begin + tiles.begin(tile),
                  rows = tiles.height(tile);
    const Scratch buffer(kFloatRows * padded_k * static_cast<int64_t>(sizeof(float)));
    const float* row[kFloatRows];
    for (int64_t r = 0; r < rows; r++)
      row[r] = widen_row(x, first + r, padded_k, buffer.as<float>() + r * padded_k);
    float* to = values + first * padded_k;
    for (int64_t k = 0; k < padded_k; k++)
      for (int64_t r = 0; r < rows; r++) *to++ = row[r][k];
  }

  void multiply(const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    const int64_t rows = block.count(), width = panels.count();
    const Scratch memory((rows * width + kBlockK * kFloatPanels) * 16 * static_cast<int64_t>(sizeof(float)));
    float *const c = memory.as<float>(), *const b = c + rows * width * 16;
    for (int64_t k = 0; k < padded_k; k += block_k)
      for (int64_t panel = 0; panel < width; panel += kFloatPanels) {
        widen_panels(weight.spec, weight.data, panels, panel, k, b);
        multiply_block(block, k, static_cast<int>(smaller(kFloatPanels, width - panel)), b, c + panel * rows * 16);
      }
    for (int64_t panel = 0; panel < width; panel++)
      finish_rows(weight, sink.from(block.begin), rows, panels.begin + panel, c + panel * rows * 16, kPanelColumns,
                  nullptr, nullptr);
  }

 private:
  int64_t length(int64_t k) const { return smaller(block_k, padded_k - k); }

  // Converts a block of k of up to kFloatPanels panels, from number `first` of a task's on, to float32.
  void widen_panels(const WeightSpec& spec, const uint8_t* weight, Span panels, int64_t first, int64_t k,
                    float* b) const {
    const bool last = first + kFloatPanels >= panels.count();  // then prefetch further along k, from panel 0 on
    const int64_t ahead = last ? block_k / kTileK * spec.tile_bytes() - first * spec.panel_bytes()
                               : kFloatPanels * spec.panel_bytes();
    for (int64_t p = 0; p < smaller(kFloatPanels, panels.count() - first); p++)
      with_format(spec.format, [&]<Format kFormat>() {
        with_step<read_as(kFormat)>(spec, [&](auto kStep) {
          widen_tiles<read_as(kFormat), kStep>(spec, weight, panels.begin + first + p, k / kTileK,
                                               length(k) / kTileK, b + p * kBlockK * 16, ahead);
        });
      });
  }

  // All rows of a block times a block of k of `width` panels; c: [panel][row][16].
  void multiply_block(Span block, int64_t k, int width, const float* b, float* c) const {
    const RowTiles tiles(block.count(), kFloatRows);
    for (int64_t tile = 0; tile < tiles.count; tile++)
      with_count<kFloatRows>(tiles.height(tile), [&](auto kRows) {
        with_count<kFloatPanels>(width, [&](auto kPanels) {
          const int64_t row = tiles.begin(tile);
          float_tile<kRows, kPanels>(values + (block.begin + row) * padded_k + k * kRows, b, kBlockK * 16, length(k),
                                     c + row * 16, block.count() * 16, k == 0);
        });
      });
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
