// SPDX-License-Identifier: Apache-2.0
// The state of a sub-group's queries while tiles of keys and values pass through local memory; all in float32. A lane
// has every sixteenth key of the scores, every sixteenth column of the sums; probabilities pass from lane to lane.
#pragma once

#include "gpu/attention/place.cuh"
#include "level_zero/attention/call.hpp"
#include "level_zero/device/floats.hpp"
#include "level_zero/device/vectors.hpp"

namespace lowbit::level_zero {

LOWBIT_INLINE float load_real(const void* from, DType dtype, int64_t at) {
  if (dtype == DType::float32) return global<float>(from)[at];
  const uint16_t bits = global<uint16_t>(from)[at];
  return dtype == DType::bfloat16 ? float_from_bfloat16(bits) : gpu::float_of_half(bits);
}
LOWBIT_INLINE void store_real(void* to, DType dtype, int64_t at, float value) {
  if (dtype == DType::float32) global<float>(to)[at] = value;
  else global<uint16_t>(to)[at] = dtype == DType::bfloat16 ? bfloat16_from_float(value) : half_of_float(value);
}

LOWBIT_INLINE float largest_of_lanes(float value) {
#pragma unroll
  for (int step = kSubGroup / 2; step; step /= 2) value = larger_of(value, shuffled_xor(value, step));
  return value;
}
LOWBIT_INLINE float sum_of_lanes(float value) {
#pragma unroll
  for (int step = kSubGroup / 2; step; step /= 2) value += shuffled_xor(value, step);
  return value;
}
LOWBIT_INLINE float exponential(float difference) { return power_of_2(difference * gpu::kLog2e); }

template <int kColumns>
struct SharedTile {
  alignas(16) float rows[kKvTile][kColumns + 4];  // keys of adjacent lanes in different banks
};

template <int kRows>
using Scores = float[kRows][kKeys];
template <int kRows, int kColumns>
using RowSums = float[kRows][kColumns / kSubGroup];

template <int kRows, int kCount>
LOWBIT_INLINE void clear(float (&of)[kRows][kCount]) {
#pragma unroll
  for (int r = 0; r < kRows; r++)
#pragma unroll
    for (int i = 0; i < kCount; i++) of[r][i] = 0;
}

// Scores: products of a sub-group's rows and those of the tile.
template <int kRows, int kColumns>
LOWBIT_INLINE void multiply_rows(Scores<kRows>& s, const float (*rows)[kColumns], const SharedTile<kColumns>& tile,
                                 int lane, int columns) {
  using Four = Vector<float, 4>;
  clear(s);
  for (int i = 0; i < columns; i += 4) {
    Four key[kKeys];
#pragma unroll
    for (int j = 0; j < kKeys; j++) key[j] = *reinterpret_cast<const Four*>(&tile.rows[lane + j * kSubGroup][i]);
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      const Four of_row = *reinterpret_cast<const Four*>(&rows[r][i]);
#pragma unroll
      for (int j = 0; j < kKeys; j++)
#pragma unroll
        for (int x = 0; x < 4; x++) s[r][j] = __fmaf_rn(of_row[x], key[j][x], s[r][j]);
    }
  }
}

// sums += p times the rows of the tile. Many columns are processed in two halves: their values would not
// fit into registers.
template <int kRows, int kColumns>
LOWBIT_INLINE void multiply_onto(float (&sums)[kRows][kColumns / kSubGroup], const Scores<kRows>& p,
                                 const SharedTile<kColumns>& tile, int lane) {
  constexpr int kSums = kColumns / kSubGroup, kTurn = kSums < 8 ? kSums : 8;
#pragma unroll
  for (int turn = 0; turn < kSums; turn += kTurn)
#pragma unroll
    for (int j = 0; j < kKeys; j++)
      for (int i = 0; i < kSubGroup; i++) {
        float of_key[kRows];
#pragma unroll
        for (int r = 0; r < kRows; r++) of_key[r] = shuffled(p[r][j], i);
#pragma unroll
        for (int c = turn; c < turn + kTurn; c++) {
          const float value = tile.rows[j * kSubGroup + i][lane + c * kSubGroup];
#pragma unroll
          for (int r = 0; r < kRows; r++) sums[r][c] = __fmaf_rn(of_key[r], value, sums[r][c]);
        }
      }
}

template <int kColumns, int kRows>
struct Running {
  static constexpr int kSums = kColumns / kSubGroup;

  const float (*q)[kColumns];  // in local memory
  int lane;
  RowSums<kRows, kColumns> out;
  float top[kRows], total[kRows];

  LOWBIT_INLINE void start() {
    clear(out);
#pragma unroll
    for (int r = 0; r < kRows; r++) top[r] = gpu::minus_infinity(), total[r] = 0;
  }

  // Turns scores into powers of e relative to the largest so far, and rescales sums and result.
  LOWBIT_INLINE void softmax(Scores<kRows>& s) {
#pragma unroll
    for (int r = 0; r < kRows; r++) {
      float largest = top[r];
#pragma unroll
      for (int j = 0; j < kKeys; j++) largest = larger_of(largest, s[r][j]);
      largest = largest_of_lanes(largest);
      const float base = largest == gpu::minus_infinity() ? 0.0f : largest, shrink = exponential(top[r] - base);
      top[r] = largest, total[r] *= shrink;
#pragma unroll
      for (int c = 0; c < kSums; c++) out[r][c] *= shrink;
#pragma unroll
      for (int j = 0; j < kKeys; j++) {
        s[r][j] = exponential(s[r][j] - base);
        total[r] += s[r][j];
      }
    }
  }
};

// Copies `rows` rows from local memory to a tensor, once all threads have written them.
template <int kRows, int kColumns>
LOWBIT_INLINE void store_rows(const gpu::HeadRows& to, DType dtype, int64_t begin,
                              const float (&from)[kRows][kColumns], int rows, int columns) {
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kColumns; at += kAttentionThreads) {
    const int r = at / kColumns, column = at % kColumns;
    if (r < rows && column < columns) store_real(to.data, dtype, begin + r * to.row + column, from[r][column]);
  }
}

// The end of a row, with a sink, a score without a value: `scale` multiplies its result.
struct RowEnd {
  float top, total, scale = 1;

  LOWBIT_INLINE void add_sink(float sink) {
    const float before = top;
    top = sink > top ? sink : top;
    if (top == gpu::minus_infinity()) return;
    scale = exponential(before - top);
    total = total * scale + exponential(sink - top);
  }
  LOWBIT_INLINE float lse() const { return top + logarithm(total); }
  LOWBIT_INLINE float factor() const { return total == 0 ? 0.0f : scale / total; }
};

}  // namespace lowbit::level_zero
