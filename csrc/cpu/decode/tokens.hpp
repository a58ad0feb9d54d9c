// SPDX-License-Identifier: Apache-2.0
// The rows of up to 256 consecutive tokens of one kv head, read once and in order. Rows that lie 4 KiB further on are prefetched, also past the end
// of a split: the thread that runs it mostly runs the next one too.
#pragma once

#include "cpu/attention/softmax.hpp"
#include "ops/decode.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kSplit = 256;      // tokens; a sum over them of int16 probabilities times int8 codes fits int32: 256 * 32767 * 127 < 2^31
constexpr int64_t kTokenTile = 32;   // tokens whose rows stay in L1 while all queries meet them
constexpr int64_t kPrefetch = 4096;  // bytes ahead, as in linear

// What one task does: the queries l0..l0 + l_count of the heads of one kv head, against the keys first..first + count. Its rows are [head of the
// group][query].
struct SplitPlace {
  int64_t b, kv_head, l0, l_count, first, count;
};

// The queries of these rows, prepared once per call, rotated if the keys are: float32 times the scale, or int16 codes with a step (times the scale).
struct QueryRows {
  const float** floats;
  const int16_t** codes;
  const float** steps;
};

// Scratch of one task.
struct SplitMemory {
  Matrix<float> scores, out;
  RowSums<float> sums;
  QueryRows q;
  float* scales;     // of the codes of the split
  int16_t* weights;  // [groups][rows][kSplit]: probabilities times scales
  float* steps;      // [groups][rows] of these
  float *weighted, *group_scales;  // [kSplit]
  void* program;     // of the score programs
};

struct TokenRows {
  const char* data;
  int64_t stride, bytes, count;  // bytes between rows and of a row; rows
  int64_t ahead;                 // from a row to the one to prefetch, in bytes

  LOWBIT_INLINE TokenRows(const TensorView& tensor, int64_t b, int64_t h, int64_t first, int64_t count) : count(count) {
    const int64_t size = static_cast<int64_t>(size_of(tensor.dtype));
    stride = tensor.stride[2] * size, bytes = tensor.size(3) * size;
    data = tensor.as<const char>() + (b * tensor.stride[0] + h * tensor.stride[1]) * size + first * stride;
    ahead = larger(kTokenTile, kPrefetch / bytes) * stride;
  }
  LOWBIT_INLINE const char* row(int64_t t) const { return data + t * stride; }

  LOWBIT_INLINE void prefetch(const char* row, int64_t rows) const {
    for (int64_t r = 0; r < rows; r++)
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(row + r * stride + ahead + line);
  }
};

// The rows of a tile of queries go in fours; two or one are left over. f(integral_constant rows, first row).
template <class F>
LOWBIT_INLINE void for_row_tiles(int64_t rows, F&& f) {
  int64_t r = 0;
  for (; r + 2 < rows; r += 4) f(std::integral_constant<int, 4>{}, r);
  if (r + 2 == rows) f(std::integral_constant<int, 2>{}, r);
  else if (r + 1 == rows) f(std::integral_constant<int, 1>{}, r);
}
constexpr int64_t kRowTile = 4;  // arrays of rows are rounded up to it

// f(integral_constant columns) for the usual head dimensions, whose loops are then unrolled, else with 0.
template <class F>
LOWBIT_INLINE void with_columns(int64_t columns, F&& f) {
  if (columns == 64) f(std::integral_constant<int, 64>{});
  else if (columns == 128) f(std::integral_constant<int, 128>{});
  else f(std::integral_constant<int, 0>{});
}

// scores[r][t] for all rows and tokens. dot(integral_constant rows, r, t, key, stride, to): four sums, of all rows with the tokens t, t + 1, ... whose
// keys are `stride` bytes apart: to[token][row].
template <class Dot>
LOWBIT_INLINE void score_tokens(const TokenRows& keys, int64_t rows, Matrix<float> scores, Dot&& dot) {
  for (int64_t t0 = 0; t0 < keys.count; t0 += kTokenTile) {
    for_row_tiles(rows, [&](auto kRows, int64_t r) {
      alignas(64) float sums[16];
      const int64_t end = smaller(keys.count, t0 + kTokenTile);
      int64_t t = t0;
      for (; t + 4 <= end; t += 4) {
        if (r == 0) keys.prefetch(keys.row(t), 4);
        unroll<kRows>([&](auto step) {
          constexpr int kFirst = step * (4 / kRows);
          dot(kRows, r, t + kFirst, keys.row(t + kFirst), keys.stride, sums + 4 * step);
        });
        float* to = scores.row(r) + t;
        if constexpr (kRows == 4) transpose_4x4(sums, to, scores.stride);
        else
          for (int i = 0; i < 4 * kRows; i++) to[i % kRows * scores.stride + i / kRows] = sums[i];
      }
      for (; t < end; t++) {  // at most three
        dot(kRows, r, t, keys.row(t), 0, sums);
        for (int i = 0; i < kRows; i++) scores.row(r + i)[t] = sums[i];
      }
    });
  }
}

// Calls add(integral_constant rows, r, t, tokens) for tiles of rows and of tokens.
template <class Add>
LOWBIT_INLINE void visit_values(const TokenRows& values, int64_t rows, Add&& add) {
  for (int64_t t = 0; t < values.count; t += kTokenTile)
    for_row_tiles(rows, [&](auto kRows, int64_t r) { add(kRows, r, t, smaller(kTokenTile, values.count - t)); });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
