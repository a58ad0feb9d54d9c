// SPDX-License-Identifier: Apache-2.0
// Keys and values as int8 or int4 codes. Queries and probabilities become int16 with one scale per row, so that a product with codes is one
// multiply-add of pairs: twice the elements of a float32 FMA, and exact. int16 against float32 queries and probabilities is an error of 2^-16
// of the largest, 250 times less than that of the codes themselves.
#pragma once

#include "cpu/decode/tokens.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr float kInt16Max = 32767.0f;

// to[i] = round(x[i] / step) for a step that makes the largest 32767; returns the step: nan if some x is nan or inf.
LOWBIT_INLINE float to_int16(const float* x, int64_t count, int16_t* to) {
  f32x16 top = set1(0.0f), poison = set1(0.0f);
  for (int64_t i = 0; i < count; i += 16) {
    const f32x16 v = load(x + i);
    top = max(abs(v), top);
    poison = fma(v, set1(0.0f), poison);
  }
  const float step = largest(top) / kInt16Max + sum(poison);
  const f32x16 inverse = set1(step > 1e-37f ? 1.0f / step : 0.0f);
  for (int64_t i = 0; i < count; i += 16) store_i16(to + i, to_int(mul(load(x + i), inverse)));
  return step;
}

LOWBIT_INLINE float scale_at(const TensorView& scale, int64_t at) {
  return scale.dtype == DType::float16 ? float_from_float16(scale.as<const uint16_t>()[at]) : scale.as<const float>()[at];
}

// Scales of the tokens of a split as float32 [token][group], zeros up to the next multiple of 16 of them.
LOWBIT_INLINE void load_scales(const TensorView& scale, const SplitPlace& at, float* to) {
  const int64_t groups = scale.size(3), step = scale.stride[2], count = at.count * groups;
  const int64_t base = at.b * scale.stride[0] + at.kv_head * scale.stride[1] + at.first * step;
  for (int64_t i = count; i < round_up(count, 16 * groups); i++) to[i] = 0.0f;
  if (step != groups) {
    for (int64_t t = 0; t < at.count; t++)
      for (int64_t g = 0; g < groups; g++) to[t * groups + g] = scale_at(scale, base + t * step + g);
    return;
  }
  int64_t i = 0;
  if (scale.dtype == DType::float32)
    for (; i + 16 <= count; i += 16) store(to + i, load(scale.as<const float>() + base + i));
  else
    for (; i + 16 <= count; i += 16) store(to + i, load_f16(scale.as<const uint16_t>() + base + i));
  for (; i < count; i++) to[i] = scale_at(scale, base + i);
}

template <KvFormat kFormat, int kRows, int kColumns>
LOWBIT_INLINE void dot_codes(const int16_t* const* q, const char* key, int64_t stride, int64_t padded, const float* scales, float* to) {
  constexpr int kTokens = 4 / kRows;
  if constexpr (kColumns != 0) padded = kColumns;
  const int16_t* x[kRows];
  unroll<kRows>([&](auto r) { x[r] = q[r]; });
  const int64_t groups = padded / kKvGroup;
  if constexpr (kFormat == KvFormat::int8) {
    i32x16 acc[4];
    unroll<4>([&](auto i) { acc[i] = set1(int32_t{0}); });
    auto step = [&](int64_t c) {
      i16x32 w[kTokens];
      unroll<kTokens>([&](auto j) { w[j] = widen_i8(reinterpret_cast<const int8_t*>(key + j * stride) + c); });
      unroll<kRows>([&](auto r) {
        const i16x32 v = load_i16(x[r] + c);
        unroll<kTokens>([&](auto j) { acc[j * kRows + r] = add_pairs(acc[j * kRows + r], w[j], v); });
      });
    };
    if constexpr (kColumns != 0) unroll<kColumns / 32>([&](auto i) { step(32 * i); });
    else for (int64_t c = 0; c < padded; c += 32) step(c);
    store_sums(to, acc[0], acc[1], acc[2], acc[3]);
  } else {
    f32x16 acc[4];
    unroll<4>([&](auto i) { acc[i] = set1(0.0f); });
    auto step = [&](int64_t g) {
      i16x32 w[kTokens];
      f32x16 scale[kTokens];
      unroll<kTokens>([&](auto j) {
        w[j] = widen_i4(reinterpret_cast<const uint8_t*>(key + j * stride) + g * kKvGroup / 2);
        scale[j] = set1(scales[j * groups + g]);
      });
      unroll<kRows>([&](auto r) {
        const i16x32 v = load_i16(x[r] + g * kKvGroup);
        unroll<kTokens>([&](auto j) { acc[j * kRows + r] = fma(to_float(add_pairs(set1(int32_t{0}), w[j], v)), scale[j], acc[j * kRows + r]); });
      });
    };
    if constexpr (kColumns != 0) unroll<kColumns / 32>([&](auto i) { step(i); });
    else for (int64_t g = 0; g < groups; g++) step(g);
    store_sums(to, acc[0], acc[1], acc[2], acc[3]);
  }
}

LOWBIT_INLINE i32x16 load_i32(const float* p) { return bits_of(load(p)); }
LOWBIT_INLINE void store_i32(float* p, i32x16 a) { store(p, float_of(a)); }

// 16 columns of out += codes of pairs of tokens times pairs of probabilities; p of row r starts at p + r * kSplit. zip(row, next row): pairs of codes.
template <int kRows, class Zip>
LOWBIT_INLINE void add_code_columns(const int16_t* p, const char* row, int64_t stride, int64_t ahead, int64_t tokens, float* out, int64_t out_stride, Zip&& zip) {
  i32x16 acc[kRows];
  unroll<kRows>([&](auto r) { acc[r] = load_i32(out + r * out_stride); });
  auto step = [&](int64_t t, int64_t next) {
    __builtin_prefetch(row + ahead), __builtin_prefetch(row + next + ahead);
    const i16x32 codes = zip(row, row + next);
    unroll<kRows>([&](auto r) { acc[r] = add_pairs(acc[r], codes, load_pair(p + r * kSplit + t)); });
  };
  int64_t t = 0;
  for (; t + 2 <= tokens; t += 2, row += 2 * stride) step(t, stride);
  if (t < tokens) step(t, 0);  // the probability of the token behind the last is 0
  unroll<kRows>([&](auto r) { store_i32(out + r * out_stride, acc[r]); });
}

template <KvFormat kFormat>
struct CodeKv {
  static constexpr bool kCodes = true;
  static constexpr bool kInt8 = kFormat == KvFormat::int8;

  static void scores(const DecodeArgs& args, const TokenRows& keys, const QueryRows& q, int64_t rows, Matrix<float> scores, SplitMemory& memory,
                     const SplitPlace& at) {
    const int64_t padded = kv_padded(args.q.size(3));
    load_scales(args.k_scale, at, memory.scales);
    with_columns(padded, [&](auto kColumns) {
      score_tokens(keys, rows, scores, [&](auto kRows, int64_t r, int64_t t, const char* key, int64_t stride, float* to) {
        dot_codes<kFormat, kRows, kColumns>(q.codes + r, key, stride, padded, memory.scales + t * (padded / kKvGroup), to);
      });
    });
    for (int64_t r = 0; r < rows; r++) {
      const f32x16 step = set1(*q.steps[r]);
      float* row = scores.row(r);
      for (int64_t t = 0; t < at.count; t += 16) {
        const f32x16 s = mul(load(row + t), step);
        store(row + t, kInt8 ? mul(s, load(memory.scales + t)) : s);
      }
    }
  }

  // p[r][t] * v_scale[t] as int16, per group of columns that shares a scale; then integers; then times the step of (group, row).
  static void values(const DecodeArgs& args, const TokenRows& values, int64_t rows, Matrix<float> p, Matrix<float> out, SplitMemory& memory,
                     const SplitPlace& at) {
    const int64_t padded = kv_padded(args.out.size(3)), groups = args.v_scale.size(3), group_columns = padded / groups, tokens = round_up(at.count, 16);
    const int64_t stored_rows = round_up(rows, kRowTile);
    load_scales(args.v_scale, at, memory.scales);
    for (int64_t g = 0; g < groups; g++) {
      const float* scales = memory.scales;
      if (groups > 1) {
        scales = memory.group_scales;
        for (int64_t t = 0; t < tokens; t++) memory.group_scales[t] = memory.scales[t * groups + g];
      }
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t t = 0; t < tokens; t += 16) store(memory.weighted + t, mul(load(p.row(r) + t), load(scales + t)));
        memory.steps[g * stored_rows + r] = to_int16(memory.weighted, tokens, memory.weights + (g * stored_rows + r) * kSplit);
      }
    }
    visit_values(values, rows, [&](auto kRows, int64_t r, int64_t t, int64_t count) {
      for (int64_t c = 0; c < padded; c += 16) {
        const int16_t* weights = memory.weights + (c / group_columns * stored_rows + r) * kSplit + t;
        auto add = [&](const char* row, auto&& zip) { add_code_columns<kRows>(weights, row, values.stride, values.ahead, count, out.row(r) + c, out.stride, zip); };
        const char* row = values.row(t) + (kInt8 ? c : c / 32 * 16);
        auto bytes = [](const char* a) { return reinterpret_cast<const uint8_t*>(a); };
        if constexpr (kInt8) add(row, [](const char* a, const char* b) { return zip_i8(reinterpret_cast<const int8_t*>(a), reinterpret_cast<const int8_t*>(b)); });
        else if (c % 32) add(row, [&](const char* a, const char* b) { return zip_i4<true>(bytes(a), bytes(b)); });
        else add(row, [&](const char* a, const char* b) { return zip_i4<false>(bytes(a), bytes(b)); });
      }
    });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < padded; c += 16)
        store(out.row(r) + c, mul(to_float(load_i32(out.row(r) + c)), set1(memory.steps[c / group_columns * stored_rows + r])));
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
