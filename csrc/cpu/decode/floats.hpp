// SPDX-License-Identifier: Apache-2.0
// Keys and values in float32, bfloat16 or float16, widened in registers.
#pragma once

#include "cpu/decode/tokens.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// 16 elements of a row, zeros behind its end.
template <class E>
LOWBIT_INLINE f32x16 load_columns(const E* row, int64_t c, int64_t columns) {
  if (c + 16 <= columns) return load16(row + c);
  E last[16] = {};
  for (int64_t i = c; i < columns; i++) last[i - c] = row[i];
  return load16(last);
}

// to[token][row] = q[row] . k[token], four sums. Rows of q are padded with zeros. kColumns 0: not known to the compiler.
template <class E, int kRows, int kColumns>
LOWBIT_INLINE void dot_floats(const float* const* q, const char* key, int64_t stride, int64_t columns, float* to) {
  constexpr int kTokens = 4 / kRows;
  if constexpr (kColumns != 0) columns = kColumns;
  f32x16 acc[4];
  const float* x[kRows];
  const E* k[kTokens];
  unroll<4>([&](auto i) { acc[i] = set1(0.0f); });
  unroll<kRows>([&](auto r) { x[r] = q[r]; });
  unroll<kTokens>([&](auto j) { k[j] = reinterpret_cast<const E*>(key + j * stride); });
  auto step = [&](int64_t c, auto&& load_key) {
    f32x16 w[kTokens];
    unroll<kTokens>([&](auto j) { w[j] = load_key(k[j]); });
    unroll<kRows>([&](auto r) {
      const f32x16 v = load(x[r] + c);
      unroll<kTokens>([&](auto j) { acc[j * kRows + r] = fma(v, w[j], acc[j * kRows + r]); });
    });
  };
  if constexpr (kColumns != 0) {
    unroll<kColumns / 16>([&](auto i) { step(16 * i, [&](const E* row) { return load16(row + 16 * i); }); });
  } else {
    int64_t c = 0;
    for (; c + 16 <= columns; c += 16) step(c, [&](const E* row) { return load16(row + c); });
    if (c < columns) step(c, [&](const E* row) { return load_columns(row, c, columns); });
  }
  store_sums(to, acc[0], acc[1], acc[2], acc[3]);
}

// out[row][c] += sum over tokens of p[row][token] * v[token][c].
template <class E, int kRows, int kVectors, bool kWhole>
LOWBIT_INLINE void add_float_columns(Matrix<float> p, const TokenRows& values, int64_t t0, int64_t tokens, int64_t c, int64_t columns, Matrix<float> out) {
  f32x16 acc[kRows][kVectors];
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { acc[r][i] = load(out.row(r) + c + 16 * i); }); });
  const char* at = values.row(t0);
  for (int64_t t = t0; t < t0 + tokens; t++, at += values.stride) {
    const E* row = reinterpret_cast<const E*>(at);
    f32x16 value[kVectors];
    unroll<kVectors>([&](auto i) { __builtin_prefetch(at + values.ahead + (c + 16 * i) * static_cast<int64_t>(sizeof(E))); });
    unroll<kVectors>([&](auto i) { value[i] = kWhole ? load16(row + c + 16 * i) : load_columns(row, c + 16 * i, columns); });
    unroll<kRows>([&](auto r) {
      const f32x16 x = set1(p.row(r)[t]);
      unroll<kVectors>([&](auto i) { acc[r][i] = fma(x, value[i], acc[r][i]); });
    });
  }
  unroll<kRows>([&](auto r) { unroll<kVectors>([&](auto i) { store(out.row(r) + c + 16 * i, acc[r][i]); }); });
}

template <class E>
struct FloatKv {
  static constexpr bool kCodes = false;

  static void scores(const DecodeArgs& args, const TokenRows& keys, const QueryRows& q, int64_t rows, Matrix<float> scores, SplitMemory&, const SplitPlace&) {
    const int64_t columns = args.q.size(3);
    with_columns(columns, [&](auto kColumns) {
      score_tokens(keys, rows, scores, [&](auto kRows, int64_t r, int64_t, const char* key, int64_t stride, float* to) {
        dot_floats<E, kRows, kColumns>(q.floats + r, key, stride, columns, to);
      });
    });
  }

  static void values(const DecodeArgs& args, const TokenRows& values, int64_t rows, Matrix<float> p, Matrix<float> out, SplitMemory&, const SplitPlace&) {
    const int64_t columns = args.out.size(3);
    visit_values(values, rows, [&](auto kRows, int64_t r, int64_t t, int64_t tokens) {
      const Matrix<float> from{p.row(r), p.stride}, to{out.row(r), out.stride};
      int64_t c = 0;
      for (; c + 16 * kFloatPanels <= columns; c += 16 * kFloatPanels)
        add_float_columns<E, kRows, kFloatPanels, true>(from, values, t, tokens, c, columns, to);
      for (; c < columns; c += 16) add_float_columns<E, kRows, 1, false>(from, values, t, tokens, c, columns, to);
    });
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
