// SPDX-License-Identifier: Apache-2.0
// Float tiles, accumulated in float32, for every weight format with float activations. Two ways, chosen by the number
// of rows:
//   few rows: each weight is converted in registers and used at once (linear_stream): memory speed at m = 1;
//   many:     a block of k of a panel is converted to float32 in L1 and multiplied like any matrix (linear_blocked).
#pragma once

#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// ---- few rows ------------------------------------------------------------------------------------------------------

// The factor that all values have in common is applied at the end: multiplied by it, activations might overflow.
template <Format kFormat>
constexpr float kLate = unshift_of<kFormat>(0) > 1.0f ? unshift_of<kFormat>(0) : 1.0f;

// Activations in the order in which the halves are read, each times 2^-shift but for kLate, and their sums per group
// (the factors of the zero points).
struct StreamRows {
  float* values;      // [rows][stride]
  float* group_sums;  // [rows][groups]
  int64_t stride, groups;
};

template <Format kFormat>
StreamRows order_rows(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const int64_t count = args.m, padded = spec.padded_k(), groups = spec.groups();
  Arena arena{
      static_cast<char*>(scratch(Scratch::call, (count * (padded + 16 + groups) + 64) * sizeof(float) + 2 * kRedZone))};
  StreamRows rows{arena.array<float>(count * (padded + 16)), arena.array<float>(count * groups), padded + 16, groups};
  float* buffer = static_cast<float*>(scratch(Scratch::task, padded * sizeof(float)));
  for (int64_t row = 0; row < count; row++) {
    const float* x = widen_row(args, row, buffer);
    float* out = rows.values + row * rows.stride;
    // int4: byte i of a column's four bytes carries 2^(8 i), the high nibbles 2^4 more.
    for (int64_t k = 0; k < padded; k += 4)
      unroll<4>([&](auto i) {
        constexpr float kLow = unshift_of<kFormat>(2 * i) / kLate<kFormat>,
                        kHigh = unshift_of<kFormat>(2 * i + 1) / kLate<kFormat>;
        out[k + i] = x[k + i] * (k % kTileK < kHalfK ? kLow : kHigh);
      });
    for (int64_t g = 0; g < groups; g++) rows.group_sums[row * groups + g] = group_sum(spec, x, g);
  }
  return rows;
}

// Sums of one group, in kChains independent chains per row: an FMA takes 4 cycles, and two start in each.
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

// Adds the `step`-th kStep of a panel. Values of int4 alternate between the halves of a tile, those of the other
// formats follow one another.
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
      kValues == 1 ? 4 : 1;  // units at once, so that the chain of every value is known to the compiler
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
void stream_panel(const LinearArgs& args, const PanelView& view, const StreamRows& rows, int64_t row, int64_t panel) {
  const WeightSpec& spec = args.weight_spec;
  Ahead next(spec, view, view.bytes, in_four_streams<kFormat>(spec, kStreamFour));
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
  for (int r = 0; r < kRows; r++) finish(args, row + r, panel, result[r], nullptr);
}

// A panel as it is read: codes in planes are unpacked first, to scratch memory, for all rows at once.
template <Format kFormat>
LOWBIT_INLINE PanelView readable_panel(const WeightSpec& spec, const uint8_t* weight, int64_t panel) {
  PanelView view = view_panel(spec, weight, panel);
  if (kFormat != Format::int8 || !is_unpacked(spec.format)) return view;
  uint8_t* room = static_cast<uint8_t*>(scratch(Scratch::task, spec.tiles() * kByteTile));
  view.codes = readable_tiles<kFormat>(spec, view, 0, spec.tiles(), room), view.end = room + spec.tiles() * kByteTile;
  return view;
}

template <Format kFormat>
void linear_stream(const LinearArgs& args) {
  const int64_t panels = args.weight_spec.panels();
  const int threads = threads_for_products(args.m, args.weight_spec);
  const int64_t chunk = panel_chunk(panels, threads, 1);
  const StreamRows rows = order_rows<kFormat>(args);
  const RowTiles tiles(args.m, kStreamRows);
  parallel_for(ceil_div(panels, chunk), threads, [&](int64_t task) {
    for (int64_t panel = task * chunk; panel < smaller(panels, (task + 1) * chunk); panel++) {
      const PanelView view = readable_panel<kFormat>(args.weight_spec, args.weight, panel);
      for (int64_t tile = 0; tile < tiles.count; tile++)
        with_count<kStreamRows>(tiles.height(tile), [&](auto kRows) {
          with_step<kFormat>(args.weight_spec, [&](auto kStep) {
            stream_panel<kFormat, kStep, kRows>(args, view, rows, tiles.begin(tile), panel);
          });
        });
    }
  });
}

// ---- many rows -----------------------------------------------------------------------------------------------------

constexpr int64_t kBlockK = 256;  // a panel's block is 16 KiB of float32: half of L1

// c[row][panel] (+)= sum over k of a[k][row] * b[panel][k].
template <int kRows, int kPanels>
[[gnu::noinline]] void float_tile(const float* a, const float* b, int64_t b_stride, int64_t k, float* c,
                                  int64_t c_stride, bool first) {
  f32x16 acc[kRows][kPanels];
  for (int r = 0; r < kRows; r++)
    for (int p = 0; p < kPanels; p++) acc[r][p] = first ? set1(0.0f) : load(c + r * c_stride + p * 16);
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
    for (int p = 0; p < kPanels; p++) store(c + r * c_stride + p * 16, acc[r][p]);
}

// Rows first..first+count interleaved by tile: a tile's rows as [k][rows in the tile].
float* interleave_rows(const LinearArgs& args, int64_t first, int64_t count, const RowTiles& tiles) {
  const int64_t padded = args.weight_spec.padded_k();
  float* out = static_cast<float*>(scratch(Scratch::call, count * padded * sizeof(float)));
  parallel_for(tiles.count, threads_for(count * padded), [&](int64_t tile) {
    const int64_t begin = tiles.begin(tile), rows = tiles.height(tile);
    float* buffer = static_cast<float*>(scratch(Scratch::task, kFloatRows * padded * sizeof(float)));
    const float* x[kFloatRows];
    for (int64_t r = 0; r < rows; r++) x[r] = widen_row(args, first + begin + r, buffer + r * padded);
    float* to = out + begin * padded;
    for (int64_t k = 0; k < padded; k++)
      for (int64_t r = 0; r < rows; r++) *to++ = x[r][k];
  });
  return out;
}

// One loop for every format: a block is converted once for all rows.
void linear_blocked(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const int64_t padded = spec.padded_k(), panels = spec.panels();
  constexpr int64_t kPass = 480, kBlockTiles = 240 / kFloatRows;  // 240 rows x 256 k of float32 are 240 KiB of L2
  for (int64_t first = 0; first < args.m; first += kPass) {
    const int64_t count = smaller(kPass, args.m - first), blocks = ceil_div(ceil_div(count, kFloatRows), kBlockTiles);
    const RowTiles tiles(count, kFloatRows);
    const float* a = interleave_rows(args, first, count, tiles);
    const int threads = threads_for_products(args.m, spec);
    const int64_t chunk = panel_chunk(panels, threads, kFloatPanels), chunks = ceil_div(panels, chunk);
    parallel_for(blocks * chunks, threads, [&](int64_t task) {
      const int64_t tile_begin = task / chunks * kBlockTiles, tile_end = smaller(tiles.count, tile_begin + kBlockTiles);
      const int64_t row_begin = tiles.begin(tile_begin), rows = tiles.begin(tile_end) - row_begin;
      const int64_t panel_begin = task % chunks * chunk, width = smaller(chunk, panels - panel_begin);
      float* c =
          static_cast<float*>(scratch(Scratch::task, (rows * width + kBlockK * kFloatPanels) * 16 * sizeof(float)));
      float* b = c + rows * width * 16;
      for (int64_t k = 0; k < padded; k += kBlockK) {
        const int64_t length = smaller(kBlockK, padded - k);
        for (int64_t panel = 0; panel < width; panel += kFloatPanels) {
          const int count_p = static_cast<int>(smaller(kFloatPanels, width - panel));
          const bool last = panel + kFloatPanels >= width;  // then the next block is further along k in the first panel
          const int64_t ahead = last ? kBlockK / kTileK * spec.tile_bytes() - panel * spec.panel_bytes()
                                     : kFloatPanels * spec.panel_bytes();
          for (int p = 0; p < count_p; p++)
            with_format(spec.format, [&]<Format kFormat>() {
              with_step<read_as(kFormat)>(spec, [&](auto kStep) {
                widen_tiles<read_as(kFormat), kStep>(spec, args.weight, panel_begin + panel + p, k / kTileK,
                                                     length / kTileK, b + p * kBlockK * 16, ahead);
              });
            });
          for (int64_t tile = tile_begin; tile < tile_end; tile++)
            with_count<kFloatRows>(tiles.height(tile), [&](auto kRows) {
              with_count<kFloatPanels>(count_p, [&](auto kPanels) {
                const int64_t row = tiles.begin(tile);
                float_tile<kRows, kPanels>(a + row * padded + k * kRows, b, kBlockK * 16, length,
                                           c + ((row - row_begin) * width + panel) * 16, width * 16, k == 0);
              });
            });
        }
      }
      for (int64_t row = 0; row < rows; row++)
        for (int64_t panel = 0; panel < width; panel++)
          finish(args, first + row_begin + row, panel_begin + panel, load(c + (row * width + panel) * 16), nullptr);
    });
  }
}

template <Format kFormat>
void linear_float(const LinearArgs& args) {
  args.m <= 2 * kStreamRows ? linear_stream<kFormat>(args)
                            : linear_blocked(args);  // from there on converting once pays
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
