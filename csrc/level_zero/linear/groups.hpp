// SPDX-License-Identifier: Apache-2.0
// The end of linear within a work-group: applies the scales of groups along k, adds the sums of its workers in order,
// and runs gpu/linear/epilogue.cuh. A sum of codes becomes (gpu/linear/call.hpp) w_scale * (scale * (dot + start) +
// zero - w_zero * sum).
#pragma once

#include "gpu/linear/epilogue.cuh"
#include "level_zero/device/vectors.hpp"
#include "level_zero/linear/levels.hpp"

namespace lowbit::level_zero {

using gpu::LinearCall;
using gpu::RowSum;

// Workers take the tiles along k in turn (split-k within a work-group): sub-groups, or 16 threads each (portable.hpp).
constexpr int kWorkers = 8;

#define LOWBIT_LINEAR(name, ...)                                                    \
  LOWBIT_KERNEL(name, lowbit::level_zero::kGroupThreads, lowbit::gpu::LinearCall) { \
    lowbit::level_zero::__VA_ARGS__(args);                                          \
  }

// Scale and zero point of one column in one part of a tile.
struct Scale {
  float scale, zero;

  LOWBIT_INLINE Scale(const LinearCall& call, const uint8_t* panel, int part, int column)
      : scale(1.0f), zero(static_cast<float>(zero_of_symmetric())) {
    const int unclamped = part >> call.group_shift, group = unclamped < call.groups ? unclamped : call.groups - 1;
    const auto half_at = [&](int64_t section) {
      return gpu::float_of_half(global<uint16_t>(panel + section)[group * kPanelColumns + column]);
    };
    if (call.spec.group_size) scale = half_at(call.sections.group_scale);
    if (has_zero_points()) zero = half_at(call.sections.zero);
  }
};

LOWBIT_INLINE RowSum row_sum(const RowSum* from) {  // one load of 16 bytes
  return __builtin_bit_cast(RowSum, *global<u32x4>(from));
}

// The zero point that products have already subtracted: that of a symmetric weight, except for int4 codes, where it is
// 0 (gpu/linear/activations.cuh).
template <bool kCodes>
LOWBIT_INLINE float subtracted_zero() {
  return kCodes && code_bits() == 4 ? 0.0f : static_cast<float>(zero_of_symmetric());
}

LOWBIT_INLINE float scaled_dot(int32_t dot, const RowSum& row, float zero) {
  const auto whole = static_cast<int32_t>(static_cast<uint32_t>(dot) + static_cast<uint32_t>(row.start));
  const float scaled = __fmaf_rn(static_cast<float>(whole), row.scale, row.zero);
  return has_zero_points() ? __fmaf_rn(zero - subtracted_zero<true>(), -row.sum, scaled) : scaled;
}

// result + scale * (the sum over a part of a tile, for one row and column).
LOWBIT_INLINE float add_part(float result, int32_t dot, const RowSum* row, const Scale& of) {
  return __fmaf_rn(scaled_dot(dot, row_sum(row), of.zero), of.scale, result);
}
LOWBIT_INLINE float add_part(float result, float sum, const RowSum* row, const Scale& of) {
  if (has_zero_points()) sum = __fmaf_rn(subtracted_zero<false>() - of.zero, row_sum(row).sum, sum);
  return __fmaf_rn(sum, of.scale, result);
}

// The dot product of a row that contains inf or nan, weight by weight, for a format of several parts; without the
// column's scale.
LOWBIT_INLINE float nonfinite_dot(const LinearCall& call, const uint8_t* panel, int64_t row, int column,
                              const LevelParts* levels) {
  float sum = 0.0f;
  for (int64_t k = 0; k < call.spec.k; k++) {
    const int at = static_cast<int>(k % kTileK);
    const uint8_t* tile = panel + call.sections.codes + k / kTileK * (128 * code_bits());
    float weight;
    if (!has_floats()) {
      const uint32_t code = global<uint8_t>(tile)[at / 4 % 8 * 64 + column * 4 + at % 4] >> at / 32 * 4 & 15;
      const int64_t part = call.spec.group_size ? k * scales_per_tile() / kTileK : 0;
      weight = whole_level(levels[code]) * Scale(call, panel, static_cast<int>(part), column).scale;
    } else if (code_bits() == 32) {
      weight = global<float>(tile)[at * kPanelColumns + column];
    } else {
      weight = gpu::float_of_half(global<uint16_t>(tile)[at * kPanelColumns + column]);
    }
    sum = __fmaf_rn(gpu::load_as_float(call.x, call.dtype, row * call.spec.k + k), weight, sum);
  }
  return sum;
}

// Adds the workers' sums, 32 bits each: floats, or integers if codes have one scale for all k.
template <bool kCodes, int kSums, int kRows>
LOWBIT_INLINE void finish_sums(const LinearCall& call, const uint8_t* panel, int64_t first_column, int64_t first_row,
                               const uint32_t (&sums)[kSums][kRows][kPanelColumns], const LevelParts* levels,
                               int threads) {
  for (int at = static_cast<int>(threadIdx.x); at < kRows * static_cast<int>(kPanelColumns); at += threads) {
    const int column = at % static_cast<int>(kPanelColumns), block_row = at / static_cast<int>(kPanelColumns);
    const int64_t row = first_row + block_row, n = first_column + column;
    if (row >= call.m || n >= call.spec.n) continue;
    float sum = 0.0f, row_scale = 1.0f;
    if (kCodes && scales_per_tile() == 0) {
      uint32_t whole = 0;  // wraps around, which start undoes
      for (int i = 0; i < kSums; i++) whole += sums[i][block_row][column];
      sum = scaled_dot(static_cast<int32_t>(whole), row_sum(call.sums + row), 0.0f);
    } else {
      for (int i = 0; i < kSums; i++) sum += __uint_as_float(sums[i][block_row][column]);
    }
    if constexpr (!kCodes) {
      row_scale = call.row_scale[row];
      if (weight_parts() > 1 && row_scale < 0.0f) {
        sum = nonfinite_dot(call, panel, row, column, levels), row_scale = 1.0f;
      }
    }
    if (!has_floats()) {
      sum *= global<float>(panel + call.sections.column_scale)[column];
      if (call.x_format == XFormat::int8_row_asymmetric)
        sum = __fmaf_rn(call.row_offset[row], global<float>(panel + call.sections.column_sum)[column], sum);
    }
    gpu::finish<Format::float32>(call, row, n, sum, {.column_scale = false, .row_scale = row_scale});
  }
}

}  // namespace lowbit::level_zero
