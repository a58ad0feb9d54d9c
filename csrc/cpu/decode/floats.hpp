// SPDX-License-Identifier: Apache-2.0
// Keys and values in float32, bfloat16 or float16, widened in registers.
#pragma once

#include "cpu/decode/tokens.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE Twice twice(const bfloat16_bits* p) { return twice_bf16(&p->bits); }
LOWBIT_INLINE Twice twice(const float16_bits* p) { return twice_f16(&p->bits); }

// The column, out of 16, in lane i of the vector pair that twice() makes from E.
template <class E>
constexpr int64_t column_of(int64_t i) {
  return std::is_same_v<E, bfloat16_bits> ? (i & 3) | (i & 4) << 1 | (i & 8) >> 1 : i;
}

template <class E>
LOWBIT_INLINE f32x16 load_unordered(const E* p) {
  if constexpr (std::is_same_v<E, bfloat16_bits>) return load_bf16_unordered(&p->bits);
  else return load16(p);
}

// Up to 16 elements of a row from c on, padded with zeros.
template <class E>
struct LastColumns {
  E data[16] = {};
  LOWBIT_INLINE LastColumns(const E* row, int64_t c, int64_t columns) {
    for (int64_t i = c; i < smaller(columns, c + 16); i++) data[i - c] = row[i];
  }
};

// to[row][token] = q[row] . k[token], for two tokens by four rows, or four by two. q: [8 columns][pair of rows][16
// lanes], padded with zeros. kColumns 0: known at run time only.
template <class E, int kRows, int kColumns>
LOWBIT_INLINE void score_floats(const float* q, const char* key, int64_t stride, int64_t columns, float* to,
                                int64_t to_stride) {
  constexpr int kPairs = kRows / 2, kTokens = 8 / kRows;
  if constexpr (kColumns != 0) columns = kColumns;
  f32x16 acc[kPairs * kTokens];
  const E* k[kTokens];
  unroll<kTokens>([&](auto j) { k[j] = reinterpret_cast<const E*>(key + j * stride); });
  unroll<4>([&](auto i) { acc[i] = set1(0.0f); });
  auto step = [&](const float* x, auto&& columns_of) __attribute__((always_inline)) {
    Twice w[kTokens];
    unroll<kTokens>([&](auto j) { w[j] = columns_of(k[j]); });
    unroll<kPairs>([&](auto p) {
      const f32x16 a = in_register(load(x + 16 * p));
      unroll<kTokens>([&](auto j) { acc[p * kTokens + j] = fma(a, w[j].a, acc[p * kTokens + j]); });
    });
    unroll<kPairs>([&](auto p) {
      const f32x16 b = in_register(load(x + 16 * (kPairs + p)));
      unroll<kTokens>([&](auto j) { acc[p * kTokens + j] = fma(b, w[j].b, acc[p * kTokens + j]); });
    });
  };
  if constexpr (kColumns != 0) {
    unroll<kColumns / 16>(
        [&](auto i) { step(q + 32 * kPairs * i, [&](const E* row) { return twice(row + 16 * i); }); });
  } else {
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) step(q + 2 * kPairs * c, [&](const E* row) { return twice(row + c); });
    if (c < columns)
      step(q + 2 * kPairs * c, [&](const E* row) { return twice(LastColumns<E>(row, c, columns).data); });
  }
  store_scores<kRows>(to, to_stride, half_sums(acc[0], acc[1], acc[2], acc[3]));
}

// out[row][c] += sum over tokens of p[row][token] * v[token][c].
template <class E, int kRows, int kVectors, bool kWhole>
LOWBIT_INLINE void add_float_columns(Matrix<float> p, const char* at, int64_t stride, int64_t tokens, int64_t c,
                                     int64_t columns, Matrix<float> out, LinesAhead& lines) {
  LinesAhead ahead = lines;  // a copy, in registers
  f32x16 acc[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { acc[r][i] = load(out.row(r) + c + 16 * i); }); });
  auto add = [&](int64_t t, const char* from) __attribute__((always_inline)) {
    const E* row = reinterpret_cast<const E*>(from);
    f32x16 value[kVectors];
    unroll<kVectors>([&](auto i) {
      value[i] = load_unordered(kWhole ? row + c + 16 * i : LastColumns<E>(row, c + 16 * i, columns).data);
    });
    unroll<kRows>([&](auto r) {
      const f32x16 x = set1(p.row(r)[t]);
      unroll<kVectors>([&](auto i) { acc[r][i] = fma(x, value[i], acc[r][i]); });
    });
  };
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4, at += 4 * stride) {
    ahead.fetch(kVectors * static_cast<int>(sizeof(E)));
    unroll<4>([&](auto i) { add(t + i, at + i * stride); });
  }
  for (; t < tokens; t++, at += stride) add(t, at);
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { store(out.row(r) + c + 16 * i, acc[r][i]); }); });
  lines = ahead;
}

template <class E>
struct FloatKv {
  static constexpr bool kCodes = false;
  using Element = E;

  static void scores(const DecodeArgs& args, const TokenRows& keys, QueryRows q, int64_t rows, SplitMemory& memory,
                     const SplitRange&) {
    const int64_t columns = args.q.size(3);
    with_columns(columns, [&](auto kColumns) {
      score_tokens<kColumns* static_cast<int64_t>(sizeof(E))>(
          keys, rows, memory, [=](auto kRows, int64_t h, int64_t r) __attribute__((always_inline)) {
            const float* floats = q.floats + (h * q.head_rows + r) * q.columns;
            return [=](bool, int64_t, const char* key, int64_t stride, float* to, int64_t to_stride)
                       __attribute__((always_inline)) {
                         score_floats<E, kRows, kColumns>(floats, key, stride, columns, to, to_stride);
                       };
          });
    });
  }

  static void values(const DecodeArgs& args, const TokenRows& values, int64_t rows, SplitMemory& memory,
                     const SplitRange&) {
    const int64_t columns = args.out.size(3);
    visit_values(values, rows,
                 [&](auto kRows, int64_t h, int64_t r, int64_t t, int64_t tokens, LinesAhead& ahead)
                     __attribute__((always_inline)) {
                       const int64_t first = h * memory.head_rows + r;
                       const Matrix<float> from{memory.scores.row(first) + t, memory.scores.stride},
                           to{memory.out.row(first), memory.out.stride};
                       const char* at = values.row(h, t);
                       int64_t c = 0;
                       for (; c + 16 * kFloatPanels <= columns; c += 16 * kFloatPanels)
                         add_float_columns<E, kRows, kFloatPanels, true>(from, at, values.stride, tokens, c, columns,
                                                                         to, ahead);
                       for (; c < columns; c += 16)
                         add_float_columns<E, kRows, 1, false>(from, at, values.stride, tokens, c, columns, to, ahead);
                     });
    if constexpr (std::is_same_v<E, bfloat16_bits>)
      for (int64_t h = 0; h < values.heads; h++)
        for (int64_t r = 0; r < rows; r++)
          for (int64_t c = 0; c < columns; c += 16) {
            float* to = memory.out.row(h * memory.head_rows + r) + c;
            store(to, ordered_bf16(load(to)));
          }
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
