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
LOWBIT_INLINE f32x16 load_scale16(const float* p) { return load(p); }
LOWBIT_INLINE f32x16 load_scale16(const uint16_t* p) { return load_f16(p); }

// Scales [token][group] of a kv head as float32, zeros up to the next multiple of 16 tokens; those of the next split are prefetched.
template <class T>
LOWBIT_INLINE void load_scales(const T* from, int64_t step, int64_t groups, int64_t tokens, float* to) {
  const int64_t count = tokens * groups;
  T some[16];
  int64_t i = 0, t = 0, g = 0;
  for (; i + 16 <= count; i += 16) {
    if (step == groups) {
      __builtin_prefetch(from + i + kSplit * step);
      store(to + i, load_scale16(from + i));
      continue;
    }
    for (int j = 0; j < 16; j++) {
      if (g == 0) __builtin_prefetch(from + (t + kSplit) * step);
      some[j] = from[t * step + g];
      if (++g == groups) g = 0, t++;
    }
    store(to + i, load_scale16(some));
  }
  for (int j = 0; j < 16; j++) some[j] = i + j < count ? from[(i + j) / groups * step + (i + j) % groups] : T{0};
  for (const int64_t end = round_up(count, 16 * groups); i < end; i += 16) {
    store(to + i, load_scale16(some));
    for (T& scale : some) scale = T{0};
  }
}

LOWBIT_INLINE void load_scales(const TensorView& scale, const SplitPlace& at, int64_t h, float* to) {
  const int64_t step = scale.stride[2], base = at.b * scale.stride[0] + (at.kv_head + h) * scale.stride[1] + at.first * step;
  if (scale.dtype == DType::float32) load_scales(scale.as<const float>() + base, step, scale.size(3), at.count, to);
  else load_scales(scale.as<const uint16_t>() + base, step, scale.size(3), at.count, to);
}

template <class Acc>
LOWBIT_INLINE Acc zero() {
  if constexpr (std::is_same_v<Acc, f32x16>) return set1(0.0f);
  else return set1(int32_t{0});
}

template <KvFormat kFormat>
LOWBIT_INLINE TwiceCodes twice(const char* p) {
  if constexpr (kFormat == KvFormat::int4) return twice_i4(reinterpret_cast<const uint8_t*>(p));
  else return {twice_i8(reinterpret_cast<const int8_t*>(p)), twice_i8(reinterpret_cast<const int8_t*>(p) + 16)};
}

// to[row][token] = q[row] . code[token], for two tokens with four rows, or four with two. q: [16 columns][pair of rows][32 lanes]. int4: each 32 codes
// times their scale; scales: [token][group].
template <KvFormat kFormat, int kRows, int kColumns>
LOWBIT_INLINE void score_codes(const int16_t* q, const char* key, int64_t stride, int64_t padded, const float* scales, float* to, int64_t to_stride) {
  constexpr int kPairs = kRows / 2, kTokens = 8 / kRows;
  constexpr int64_t kGroupBytes = kFormat == KvFormat::int8 ? kKvGroup : kKvGroup / 2;
  if constexpr (kColumns != 0) padded = kColumns;
  const int64_t groups = padded / kKvGroup, scale_stride = stride ? groups : 0;
  using Acc = std::conditional_t<kFormat == KvFormat::int8, i32x16, f32x16>;
  Acc acc[kPairs * kTokens];
  unroll<4>([&](auto i) { acc[i] = zero<Acc>(); });
  auto step = [&](int64_t g) __attribute__((always_inline)) {  // a group of 32 columns
    const int16_t* x = q + g * kKvGroup * 2 * kPairs;
    TwiceCodes w[kTokens];
    unroll<kTokens>([&](auto j) { w[j] = twice<kFormat>(key + j * stride + g * kGroupBytes); });
    unroll<kPairs>([&](auto p) {
      const i16x32 low = in_register(load_i16(x + 32 * p)), high = in_register(load_i16(x + 32 * (kPairs + p)));
      unroll<kTokens>([&](auto j) {
        Acc& sum = acc[p * kTokens + j];
        if constexpr (kFormat == KvFormat::int8) sum = add_pairs(add_pairs(sum, w[j].low, low), w[j].high, high);
        else sum = fma(to_float(add_pairs(add_pairs(zero<i32x16>(), w[j].low, low), w[j].high, high)), set1(scales[j * scale_stride + g]), sum);
      });
    });
  };
  if constexpr (kColumns != 0) unroll<kColumns / kKvGroup>([&](auto i) { step(i); });
  else for (int64_t g = 0; g < groups; g++) step(g);
  store_scores<kRows>(to, to_stride, half_sums(acc[0], acc[1], acc[2], acc[3]));
}

LOWBIT_INLINE i32x16 load_i32(const float* p) { return bits_of(load(p)); }
LOWBIT_INLINE void store_i32(float* p, i32x16 a) { store(p, float_of(a)); }

// 16 columns of out += codes of pairs of tokens times pairs of probabilities; p of row r starts at p + r * kSplit. zip(row, next row): pairs of codes.
// kLines are prefetched per four tokens.
template <int kRows, int kLines, class Zip>
LOWBIT_INLINE void add_code_columns(const int16_t* p, const char* row, int64_t stride, int64_t tokens, Matrix<float> out, LinesAhead& lines, Zip&& zip) {
  LinesAhead ahead = lines;  // in registers
  i32x16 acc[kRows];
  unroll<kRows>([&](auto r) { acc[r] = load_i32(out.row(r)); });
  auto step = [&](int64_t t, const char* from, int64_t next) __attribute__((always_inline)) {
    const i16x32 codes = zip(from, from + next);
    unroll<kRows>([&](auto r) { acc[r] = add_pairs(acc[r], codes, load_pair(p + r * kSplit + t)); });
  };
  int64_t t = 0;
  for (; t + 4 <= tokens; t += 4, row += 4 * stride) {
    ahead.fetch(kLines);
    step(t, row, stride), step(t + 2, row + 2 * stride, stride);
  }
  for (; t + 2 <= tokens; t += 2, row += 2 * stride) step(t, row, stride);
  if (t < tokens) step(t, row, 0);  // the probability of the token behind the last is 0
  unroll<kRows>([&](auto r) { store_i32(out.row(r), acc[r]); });
  lines = ahead;
}

template <KvFormat kFormat>
struct CodeKv {
  static constexpr bool kCodes = true;
  static constexpr bool kInt8 = kFormat == KvFormat::int8;
  using Element = int8_t;

  static void scores(const DecodeArgs& args, const TokenRows& keys, QueryRows q, int64_t rows, SplitMemory& memory, const SplitPlace& at) {
    const int64_t padded = q.columns, groups = padded / kKvGroup, head_scales = kSplit * args.k_scale.size(3);
    const float* scales = memory.scales;
    for (int64_t h = 0; h < at.heads; h++) load_scales(args.k_scale, at, h, memory.scales + h * head_scales);
    with_columns(padded, [&](auto kColumns) {
      score_tokens(keys, rows, memory, [=](auto kRows, int64_t h, int64_t r, int64_t t, const char* key, int64_t stride, float* to, int64_t to_stride) __attribute__((always_inline)) {
        score_codes<kFormat, kRows, kColumns>(q.codes + (h * q.head_rows + r) * padded, key, stride, padded, scales + h * head_scales + t * groups, to, to_stride);
      });
    });
    for (int64_t h = 0; h < at.heads; h++)
      for (int64_t r = 0; r < rows; r++) {
        const f32x16 step = set1(q.steps[h * q.head_rows + r]);
        float* row = memory.scores.row(h * memory.head_rows + r);
        for (int64_t t = 0; t < at.count; t += 16) {
          const f32x16 s = mul(load(row + t), step);
          store(row + t, kInt8 ? mul(s, load(memory.scales + h * head_scales + t)) : s);
        }
      }
  }

  // p[r][t] * v_scale[t] of kv head h as int16, per group of columns that shares a scale.
  LOWBIT_INLINE static void weigh(const DecodeArgs& args, int64_t h, int64_t rows, SplitMemory& memory, const SplitPlace& at) {
    const int64_t groups = args.v_scale.size(3), tokens = round_up(at.count, 16);
    load_scales(args.v_scale, at, h, memory.scales);
    for (int64_t g = 0; g < groups; g++) {
      const float* scales = memory.scales;
      if (groups > 1) {
        scales = memory.group_scales;
        for (int64_t t = 0; t < tokens; t++) memory.group_scales[t] = memory.scales[t * groups + g];
      }
      for (int64_t r = 0; r < rows; r++) {
        const float* p = memory.scores.row(h * memory.head_rows + r);
        const int64_t slot = (h * groups + g) * memory.head_rows + r;
        for (int64_t t = 0; t < tokens; t += 16) store(memory.weighted + t, mul(load(p + t), load(scales + t)));
        memory.steps[slot] = to_int16(memory.weighted, tokens, memory.weights + slot * kSplit);
      }
    }
  }

  // Sums of weights times codes as integers, then times the step of (group, row).
  static void values(const DecodeArgs& args, const TokenRows& values, int64_t rows, SplitMemory& memory, const SplitPlace& at) {
    const int64_t padded = kv_padded(args.out.size(3)), groups = args.v_scale.size(3), group_columns = padded / groups;
    for (int64_t h = 0; h < at.heads; h++) weigh(args, h, rows, memory, at);
    visit_values(values, rows, [&](auto kRows, int64_t h, int64_t r, int64_t t, int64_t count, LinesAhead& ahead) __attribute__((always_inline)) {
      for (int64_t c = 0; c < padded; c += 16) {
        const int16_t* weights = memory.weights + ((h * groups + c / group_columns) * memory.head_rows + r) * kSplit + t;
        const Matrix<float> out{memory.out.row(h * memory.head_rows + r) + c, memory.out.stride};
        const char* row = values.row(h, t) + (kInt8 ? c : c / 32 * 16);
        auto add = [&](auto kLines, auto&& zip) __attribute__((always_inline)) { add_code_columns<kRows, kLines>(weights, row, values.stride, count, out, ahead, zip); };
        auto bytes = [](const char* a) { return reinterpret_cast<const uint8_t*>(a); };
        constexpr std::integral_constant<int, 0> kNone;
        constexpr std::integral_constant<int, 1> kOne;  // 4 tokens of 16 bytes
        if constexpr (kInt8) add(kOne, [](const char* a, const char* b) { return zip_i8(reinterpret_cast<const int8_t*>(a), reinterpret_cast<const int8_t*>(b)); });
        else if (c % 32) add(kNone, [&](const char* a, const char* b) { return zip_i4<true>(bytes(a), bytes(b)); });
        else add(kOne, [&](const char* a, const char* b) { return zip_i4<false>(bytes(a), bytes(b)); });
      }
    });
    for (int64_t h = 0; h < at.heads; h++)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < padded; c += 16) {
          float* to = memory.out.row(h * memory.head_rows + r) + c;
          store(to, mul(to_float(load_i32(to)), set1(memory.steps[(h * groups + c / group_columns) * memory.head_rows + r])));
        }
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
