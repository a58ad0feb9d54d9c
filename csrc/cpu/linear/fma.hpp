// SPDX-License-Identifier: Apache-2.0
// Float tiles, accumulated in float32, for every weight format with float activations. Two ways, chosen by the number of rows:
//   few rows: each weight is converted in registers and used at once (linear_stream): memory speed at m = 1;
//   many:     a block of k of a panel is converted to float32 in L1 and multiplied like any matrix (linear_blocked).
#pragma once

#include "cpu/linear/dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// ---- few rows ----------------------------------------------------------------------------------------------------------------------

// Activations in the order in which units are read, each times 2^-shift, and their sums per group (what the zero point is multiplied by).
struct StreamRows {
  float* values;      // [rows][stride]
  float* group_sums;  // [rows][groups]
  int64_t stride, groups;
};

template <Format kFormat>
StreamRows order_rows(const LinearArgs& args, int64_t first, int64_t count) {
  const WeightSpec& spec = args.weight_spec;
  const int64_t padded = spec.padded_k(), groups = spec.groups(), group_k = spec.group_k();
  char* cursor = static_cast<char*>(scratch(Scratch::activations, (count * (padded + 16 + groups) + 64) * sizeof(float)));
  StreamRows rows{take<float>(cursor, count * (padded + 16)), take<float>(cursor, count * groups), padded + 16, groups};
  float* buffer = static_cast<float*>(scratch(Scratch::tile, padded * sizeof(float)));
  for (int64_t row = 0; row < count; row++) {
    const float* x = widen_row(args, first + row, buffer);
    float* out = rows.values + row * rows.stride;
    for (int64_t tile = 0; tile < spec.tiles(); tile++)
      for (int64_t unit = 0; unit < Unit<kFormat>::kPerTile; unit++)
        unroll<Unit<kFormat>::kValues>([&](auto at) {
          *out++ = x[tile * kTileK + k_in_tile<kFormat>(unit, at)] * (1.0f / static_cast<float>(1u << shift_of<kFormat>(at)));
        });
    for (int64_t g = 0; g < groups; g++) {
      f32x16 sums = set1(0.0f);
      for (int64_t i = g * group_k; i < smaller(padded, (g + 1) * group_k); i += 16) sums = add(sums, load(x + i));
      alignas(64) float lanes[16];
      store(lanes, sums);
      float total = 0.0f;
      for (float lane : lanes) total += lane;
      rows.group_sums[row * groups + g] = total;
    }
  }
  return rows;
}

// Adds 64 k of one panel to acc[row][0] (k 0..31) and acc[row][1] (k 32..63): the halves may belong to two groups.
template <Format kFormat, int kRows>
LOWBIT_INLINE void stream_tile(const PanelView& panel, const float* const* x, int64_t tile, f32x16 (&acc)[kRows][2]) {
  using U = Unit<kFormat>;
  const uint8_t* codes = panel.codes + tile * U::kPerTile * U::kBytes;
  const uint8_t* ahead = prefetch_at<1>(panel, codes);
#pragma GCC unroll 4
  for (int64_t unit = 0; unit < U::kPerTile; unit++) {
    __builtin_prefetch(ahead + unit * U::kBytes);
    const int64_t at_x = tile * kTileK + unit * U::kValues;
    unroll<U::kValues>([&](auto at) {
      const f32x16 w = U::template value<at>(codes + unit * U::kBytes);
      const int half = kFormat == Format::int4 ? at % 2 : unit >= U::kPerTile / 2;
#pragma GCC unroll 8
      for (int r = 0; r < kRows; r++) acc[r][half] = fma(w, set1(x[r][at_x + at]), acc[r][half]);
    });
  }
}

template <Format kFormat, int kRows>
void stream_panel(const LinearArgs& args, const StreamRows& rows, int64_t first, int64_t panel) {
  const WeightSpec& spec = args.weight_spec;
  const PanelView view = view_panel(spec, args.weight, panel);
  const float* x[kRows];
  for (int r = 0; r < kRows; r++) x[r] = rows.values + r * rows.stride;
  f32x16 result[kRows];
  for (int r = 0; r < kRows; r++) result[r] = set1(0.0f);

  auto add_group = [&](int64_t g, const auto& group_sum) {  // result += w_scale * (sum of value * x - zero * sum of x)
    const f32x16 w_scale = view.group_scale ? load_f16(view.group_scale + g * 16) : set1(1.0f);
    const f32x16 zero = view.zero ? load_f16(view.zero + g * 16) : set1(static_cast<float>(symmetric_zero(kFormat)));
    const f32x16 w_zero = sub(set1(kValueZero<kFormat>), zero);
    for (int r = 0; r < kRows; r++)
      result[r] = fma(fma(w_zero, set1(rows.group_sums[r * rows.groups + g]), group_sum(r)), w_scale, result[r]);
  };
  if constexpr (is_float(kFormat)) {
    f32x16 acc[kRows][2] = {};
    for (int64_t tile = 0; tile < spec.tiles(); tile++) stream_tile<kFormat, kRows>(view, x, tile, acc);
    for (int r = 0; r < kRows; r++) result[r] = add(acc[r][0], acc[r][1]);
  } else if (spec.group_size == kHalfK) {
    for (int64_t tile = 0; tile < spec.tiles(); tile++) {
      f32x16 acc[kRows][2] = {};
      stream_tile<kFormat, kRows>(view, x, tile, acc);
      add_group(2 * tile, [&](int r) { return acc[r][0]; });
      if (2 * tile + 1 < rows.groups) add_group(2 * tile + 1, [&](int r) { return acc[r][1]; });
    }
  } else {
    const int64_t tiles_per_group = spec.group_size ? spec.group_size / kTileK : spec.tiles();
    for (int64_t g = 0, tile = 0; tile < spec.tiles(); g++) {
      f32x16 acc[kRows][2] = {};
      for (const int64_t end = smaller(spec.tiles(), tile + tiles_per_group); tile < end; tile++)
        stream_tile<kFormat, kRows>(view, x, tile, acc);
      add_group(g, [&](int r) { return add(acc[r][0], acc[r][1]); });
    }
  }
  for (int r = 0; r < kRows; r++) finish(args, first + r, panel, result[r], nullptr);
}

template <Format kFormat>
void linear_stream(const LinearArgs& args) {
  const int64_t panels = args.weight_spec.panels();
  const int threads = num_threads();
  const int64_t chunk = panel_chunk(panels, threads, 1);
  for (int64_t first = 0; first < args.m; first += kStreamRows) {
    const int64_t count = smaller(kStreamRows, args.m - first);
    const StreamRows rows = order_rows<kFormat>(args, first, count);
    parallel_for(ceil_div(panels, chunk), threads, [&](int64_t task) {
      for (int64_t panel = task * chunk; panel < smaller(panels, (task + 1) * chunk); panel++)
        with_count<kStreamRows>(static_cast<int>(count), [&](auto kRows) { stream_panel<kFormat, kRows>(args, rows, first, panel); });
    });
  }
}

// ---- many rows ---------------------------------------------------------------------------------------------------------------------

constexpr int64_t kBlockK = 256;  // a panel's block is 16 KiB of float32: half of L1

// c[row][panel] (+)= sum over k of a[k][row] * b[panel][k].
template <int kRows, int kPanels>
void float_tile(const float* a, const float* b, int64_t b_stride, int64_t k, float* c, int64_t c_stride, bool first) {
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

// Rows interleaved by tile: tile t holds rows t * kFloatRows.. as [k][rows in the tile].
float* interleave_rows(const LinearArgs& args, int64_t first, int64_t count) {
  const int64_t padded = args.weight_spec.padded_k();
  float* out = static_cast<float*>(scratch(Scratch::activations, count * padded * sizeof(float)));
  parallel_for(ceil_div(count, kFloatRows), threads_for(count * padded), [&](int64_t tile) {
    const int64_t begin = tile * kFloatRows, rows = smaller(kFloatRows, count - begin);
    float* buffer = static_cast<float*>(scratch(Scratch::tile, kFloatRows * padded * sizeof(float)));
    const float* x[kFloatRows];
    for (int64_t r = 0; r < rows; r++) x[r] = widen_row(args, first + begin + r, buffer + r * padded);
    float* to = out + begin * padded;
    for (int64_t k = 0; k < padded; k++)
      for (int64_t r = 0; r < rows; r++) *to++ = x[r][k];
  });
  return out;
}

template <Format kFormat>
void linear_blocked(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const int64_t padded = spec.padded_k(), panels = spec.panels();
  constexpr int64_t kPass = 480, kBlockRows = 240;  // multiples of 4, 6 and 12; 240 rows x 256 k of float32 are 240 KiB of L2
  for (int64_t first = 0; first < args.m; first += kPass) {
    const int64_t count = smaller(kPass, args.m - first), blocks = ceil_div(count, kBlockRows);
    const float* a = interleave_rows(args, first, count);
    const int threads = num_threads();
    const int64_t chunk = panel_chunk(panels, threads, kFloatPanels), chunks = ceil_div(panels, chunk);
    parallel_for(blocks * chunks, threads, [&](int64_t task) {
      const int64_t row_begin = task / chunks * kBlockRows, rows = smaller(kBlockRows, count - row_begin);
      const int64_t panel_begin = task % chunks * chunk, width = smaller(chunk, panels - panel_begin);
      float* c = static_cast<float*>(scratch(Scratch::tile, (rows * width + kBlockK * kFloatPanels) * 16 * sizeof(float)));
      float* b = c + rows * width * 16;
      for (int64_t k = 0; k < padded; k += kBlockK) {
        const int64_t length = smaller(kBlockK, padded - k);
        for (int64_t panel = 0; panel < width; panel += kFloatPanels) {
          const int count_p = static_cast<int>(smaller(kFloatPanels, width - panel));
          for (int p = 0; p < count_p; p++)
            widen_tiles<kFormat>(spec, args.weight, panel_begin + panel + p, k / kTileK, length / kTileK, b + p * kBlockK * 16);
          for (int64_t row = 0; row < rows; row += kFloatRows) {
            const int count_r = static_cast<int>(smaller(kFloatRows, rows - row));
            with_count<kFloatRows>(count_r, [&](auto kRows) {
              with_count<kFloatPanels>(count_p, [&](auto kPanels) {
                float_tile<kRows, kPanels>(a + (row_begin + row) * padded + k * kRows, b, kBlockK * 16, length,
                                           c + (row * width + panel) * 16, width * 16, k == 0);
              });
            });
          }
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
  args.m <= kStreamRows ? linear_stream<kFormat>(args) : linear_blocked<kFormat>(args);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
