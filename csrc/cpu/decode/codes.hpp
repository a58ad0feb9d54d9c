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

// Scales of the tokens of a split as float32, [token][group] or [group][token]; zeros up to the next multiple of 16 tokens.
LOWBIT_INLINE void load_scales(const TensorView& scale, const SplitPlace& at, bool by_group, float* to) {
  const int64_t groups = scale.size(3), base = at.b * scale.stride[0] + at.kv_head * scale.stride[1] + at.first * scale.stride[2];
  const int64_t token_step = by_group ? 1 : groups, group_step = by_group ? kSplit : 1;
  for (int64_t t = 0; t < round_up(at.count, 16); t++)
    for (int64_t g = 0; g < groups; g++) to[t * token_step + g * group_step] = t < at.count ? scale_at(scale, base + t * scale.stride[2] + g) : 0.0f;
}

template <KvFormat kFormat, int kRows>
LOWBIT_INLINE void dot_codes(const int16_t* const* q, const TokenRows& keys, int64_t t, int64_t padded, const float* scales, float* to) {
  constexpr int kTokens = 4 / kRows;
  const uint8_t* k[kTokens];
  unroll<kTokens>([&](auto j) { k[j] = keys.row<uint8_t>(t + j); });
  f32x16 total[4];
  if constexpr (kFormat == KvFormat::int8) {
    i32x16 acc[4];
    unroll<4>([&](auto i) { acc[i] = set1(int32_t{0}); });
    for (int64_t c = 0; c < padded; c += 32) {
      i16x32 key[kTokens];
      unroll<kTokens>([&](auto j) { key[j] = widen_i8(reinterpret_cast<const int8_t*>(k[j]) + c); });
      unroll<kRows>([&](auto r) {
        const i16x32 x = load_i16(q[r] + c);
        unroll<kTokens>([&](auto j) { acc[j * kRows + r] = add_pairs(acc[j * kRows + r], key[j], x); });
      });
    }
    unroll<4>([&](auto i) { total[i] = to_float(acc[i]); });
  } else {
    unroll<4>([&](auto i) { total[i] = set1(0.0f); });
    for (int64_t c = 0; c < padded; c += 32) {
      i16x32 key[kTokens];
      f32x16 scale[kTokens];
      unroll<kTokens>([&](auto j) {
        key[j] = widen_i4(k[j] + c / 2);
        scale[j] = set1(scales[(t + j) * (padded / 32) + c / 32]);
      });
      unroll<kRows>([&](auto r) {
        const i16x32 x = load_i16(q[r] + c);
        unroll<kTokens>([&](auto j) {
          total[j * kRows + r] = fma(to_float(add_pairs(set1(int32_t{0}), key[j], x)), scale[j], total[j * kRows + r]);
        });
      });
    }
  }
  store_sums(to, total[0], total[1], total[2], total[3]);
}

LOWBIT_INLINE i32x16 load_i32(const float* p) { return bits_of(load(p)); }
LOWBIT_INLINE void store_i32(float* p, i32x16 a) { store(p, float_of(a)); }

// 16 columns of out += codes of pairs of tokens times pairs of probabilities; p of row r starts at p + r * kSplit.
template <int kRows, class Zip>
LOWBIT_INLINE void add_code_columns(const int16_t* p, int64_t t0, int64_t tokens, float* out, int64_t out_stride, Zip&& zip) {
  i32x16 acc[kRows];
  unroll<kRows>([&](auto r) { acc[r] = load_i32(out + r * out_stride); });
  for (int64_t t = t0; t < t0 + tokens; t += 2) {
    const i16x32 codes = zip(t);
    unroll<kRows>([&](auto r) { acc[r] = add_pairs(acc[r], codes, load_pair(p + r * kSplit + t)); });
  }
  unroll<kRows>([&](auto r) { store_i32(out + r * out_stride, acc[r]); });
}

template <KvFormat kFormat>
struct CodeKv {
  static constexpr bool kCodes = true;
  static constexpr bool kInt8 = kFormat == KvFormat::int8;

  static void scores(const DecodeArgs& args, const TokenRows& keys, const QueryRows& q, int64_t rows, Matrix<float> scores, SplitMemory& memory,
                     const SplitPlace& at) {
    const int64_t padded = kv_padded(args.q.size(3));
    load_scales(args.k_scale, at, false, memory.scales);
    score_tokens(keys, rows, scores, [&](auto kRows, int64_t r, int64_t t, float* to) {
      dot_codes<kFormat, kRows>(q.codes + r, keys, t, padded, memory.scales, to);
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
    load_scales(args.v_scale, at, true, memory.scales);
    for (int64_t g = 0; g < groups; g++)
      for (int64_t r = 0; r < rows; r++) {
        for (int64_t t = 0; t < tokens; t += 16) store(memory.weighted + t, mul(load(p.row(r) + t), load(memory.scales + g * kSplit + t)));
        memory.steps[g * stored_rows + r] = to_int16(memory.weighted, tokens, memory.weights + (g * stored_rows + r) * kSplit);
      }
    visit_values(values, rows, [&](auto kRows, int64_t r, int64_t t0, int64_t count) {
      for (int64_t c = 0; c < padded; c += 16) {
        const int16_t* weights = memory.weights + (c / group_columns * stored_rows + r) * kSplit;
        auto add = [&](auto&& zip) { add_code_columns<kRows>(weights, t0, count, out.row(r) + c, out.stride, zip); };
        if constexpr (kInt8) add([&](int64_t t) { return zip_i8(values.row<int8_t>(t) + c, values.row<int8_t>(t + 1) + c); });
        else if (c % 32) add([&](int64_t t) { return zip_i4<true>(values.row<uint8_t>(t) + c / 32 * 16, values.row<uint8_t>(t + 1) + c / 32 * 16); });
        else add([&](int64_t t) { return zip_i4<false>(values.row<uint8_t>(t) + c / 32 * 16, values.row<uint8_t>(t + 1) + c / 32 * 16); });
      }
    });
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < padded; c += 16)
        store(out.row(r) + c, mul(to_float(load_i32(out.row(r) + c)), set1(memory.steps[c / group_columns * stored_rows + r])));
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
