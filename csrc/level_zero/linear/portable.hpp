// SPDX-License-Identifier: Apache-2.0
// linear without dpas: float activations by fma, codes by byte products. A work-group computes 16 columns of 1 or 8
// rows: 16 threads, one per column, are a worker, and 8 workers take the tiles along k in turn. Float activations are
// float32 [m, padded k]; codes are ordered as for the other kernels.
#pragma once

#include "level_zero/linear/groups.hpp"

namespace lowbit::level_zero {

constexpr int kWorkerLanes = static_cast<int>(kPanelColumns), kGroupThreads = kWorkers * kWorkerLanes;

// The codes of one column in a row of a tile: four k of the first half of the tile, and four of the second.
struct Steps {
  uint32_t codes[2];

  LOWBIT_INLINE Steps(const uint8_t* tile, int row, int column) : codes{0, 0} {
    const int count = code_bits();
    const auto word_at = [=](int at) { return global<uint32_t>(tile)[at * kWorkerLanes + column]; };
    if (count == 8) {
      codes[0] = word_at(row), codes[1] = word_at(row + 8);
      return;
    }
    const auto add = [&](uint32_t word, int shift, uint32_t mask, int before) {
      codes[0] |= (word >> shift & mask) << before, codes[1] |= (word >> (shift + 4) & mask) << before;
    };
    if (count & 1) add(word_at(row % 2), row / 2, 0x01010101u, 0);
    if (count & 2) add(word_at((count & 1) * 2 + row % 4), row / 4 * 2, 0x03030303u, count & 1);
    if (count & 4) add(word_at((count & 3) * 2 + row), 0, 0x0f0f0f0fu, count & 3);
  }
};

LOWBIT_INLINE float float8_value(uint32_t code) {  // the same as float8 of weights.hpp
  const float u = __uint_as_float((code & 0x7fu) << 20 | (uint32_t{112} << 23)), twice = u * 2.0f - 0x1p-14f;
  return __uint_as_float(__float_as_uint((u < twice ? u : twice) * 256.0f) | (code & 0x80u) << 24);
}

// Weights of a column at k .. k + 3 of a tile, before scaling.
LOWBIT_INLINE void weights_at(const uint8_t* tile, uint32_t codes, int k, int column, const LevelParts* levels,
                              float (&weight)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const uint32_t code = codes >> 8 * i & 0xff;
    const int at = (k + i) * kWorkerLanes + column;
    if (has_bfloat16())
      weight[i] = float_from_bfloat16(global<uint16_t>(tile)[(k + i) / 2 * 32 + column * 2 + i % 2]);
    else if (has_floats())
      weight[i] = code_bits() == 32 ? global<float>(tile)[at] : gpu::float_of_half(global<uint16_t>(tile)[at]);
    else if (has_levels())
      weight[i] = whole_level(levels[code]);
    else
      weight[i] = has_float8() ? float8_value(code)
                               : static_cast<float>(static_cast<int32_t>(code) - zero_of_symmetric());
  }
}

template <bool kCodes, int kRows>
struct Product {
  using Part = std::conditional_t<kCodes, int32_t, float>;

  const LinearCall& call;
  const uint8_t* panel;
  int64_t first_row;
  int column;
  const LevelParts* levels;
  Part sum[2][kRows];  // for the first and the second half of a tile
  float result[kRows];

  LOWBIT_INLINE void multiply_codes(const Steps& steps, int tile, int row) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int at = row < 4 ? 2 * row : 2 * row - 7;  // order of the activations
      const auto* x = global<uint32_t>(call.ordered) + ((first_row / 8 * call.tiles + tile) * 2 + half) * 64 + at;
#pragma unroll
      for (int r = 0; r < kRows; r++) {
        const uint32_t a = x[r * 8], b = steps.codes[half];
#pragma unroll
        for (int i = 0; i < 4; i++)
          sum[half][r] += static_cast<int8_t>(a >> 8 * i) * static_cast<int32_t>(b >> 8 * i & 0xff);
      }
    }
  }

  LOWBIT_INLINE void multiply_floats(const Steps& steps, int tile, int row) {
    const int64_t stride = int64_t{call.tiles} * kTileK;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float weight[4];
      weights_at(tile_at(tile), steps.codes[half], half * 32 + row * 4, column, levels, weight);
      const auto* x = global<float>(call.ordered) + first_row * stride + tile * kTileK + half * 32 + row * 4;
#pragma unroll
      for (int r = 0; r < kRows; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum[half][r] = __fmaf_rn(x[r * stride + i], weight[i], sum[half][r]);
    }
  }

  LOWBIT_INLINE void add_scaled(int half, int part) {
    const int64_t per_row = int64_t{call.tiles} * scales_per_tile();
    const Scale of(call, panel, part, column);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      result[r] = add_part(result[r], sum[half][r], call.sums + (first_row + r) * per_row + part, of);
      sum[half][r] = 0;
    }
  }

  // After that many rows of a tile.
  LOWBIT_INLINE void end_rows(int tile, int rows) {
    const int scales = scales_per_tile();
    if (scales == 4 && rows == 4) add_scaled(0, tile * 4), add_scaled(1, tile * 4 + 2);
    if (rows < 8 || scales == 0) return;
    if (scales == 1) {
#pragma unroll
      for (int r = 0; r < kRows; r++) sum[0][r] += sum[1][r], sum[1][r] = 0;
      add_scaled(0, tile);
    } else {
      add_scaled(0, (tile * 2 + 1) * scales / 2 - 1), add_scaled(1, (tile + 1) * scales - 1);
    }
  }

  LOWBIT_INLINE const uint8_t* tile_at(int tile) const {
    return panel + call.sections.codes + int64_t{tile} * (128 * code_bits());
  }
  LOWBIT_INLINE void run(int worker) {
    for (int tile = worker; tile < call.tiles; tile += kWorkers)
      for (int row = 0; row < 8; row++) {
        const Steps steps(tile_at(tile), row, column);
        if constexpr (kCodes) multiply_codes(steps, tile, row);
        else multiply_floats(steps, tile, row);
        end_rows(tile, row + 1);
      }
  }
};

template <bool kCodes, int kRows>
LOWBIT_INLINE void linear(const LinearCall& call) {
  LOWBIT_SHARED(LevelParts, levels, [16]);
  LOWBIT_SHARED(uint32_t, sums, [kWorkers][kRows][kPanelColumns]);
  const auto group = static_cast<uint32_t>(blockIdx.x), blocks = static_cast<uint32_t>(ceil_div(call.m, kRows));
  const int64_t panel = group / blocks, first_row = int64_t{group % blocks} * kRows;
  const int thread = static_cast<int>(threadIdx.x), worker = thread / kWorkerLanes;
  if (!kCodes && has_levels()) {
    if (thread < 16) levels[thread] = level_parts(call.spec.format, thread);
    __syncthreads();
  }
  Product<kCodes, kRows> product{.call = call, .panel = call.weight + panel * call.sections.row_bytes,
                                 .first_row = first_row, .column = thread % kWorkerLanes, .levels = levels,
                                 .sum = {}, .result = {}};
  product.run(worker);
#pragma unroll
  for (int r = 0; r < kRows; r++) {
    const auto sum = product.sum[0][r] + product.sum[1][r];
    sums[worker][r][product.column] = scales_per_tile() ? __builtin_bit_cast(uint32_t, product.result[r])
                                                      : __builtin_bit_cast(uint32_t, sum);
  }
  __syncthreads();
  finish_sums<kCodes>(call, product.panel, panel * kPanelColumns, first_row, sums, levels, kGroupThreads);
}

}  // namespace lowbit::level_zero
