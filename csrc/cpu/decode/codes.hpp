// SPDX-License-Identifier: Apache-2.0
// Keys and values as int8 or int4 codes. Queries and probabilities are rounded to int16 with one scale per row, so that
// a product with codes is one multiply-add of pairs: twice the elements of a float32 FMA, and exact. The error of int16
// against float32 is 2^-16 of the largest element, 1/250 of the error of the codes themselves.
#pragma once

#include "cpu/decode/tokens.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr float kInt16Max = 32767.0f;

// The quantization step of int16 codes for values whose largest magnitude has these bits; nan if that is nan or inf,
// which are the largest as integers.
LOWBIT_INLINE float int16_step(i32x16 magnitude_bits) {
  const float top = float_from_bits(static_cast<uint32_t>(largest(magnitude_bits)));
  return top / kInt16Max + (top - top);
}
LOWBIT_INLINE i32x16 larger_magnitude(i32x16 bits, f32x16 x) { return max(bits, bits_of(abs(x))); }

// to[i] = round(x[i] / step).
LOWBIT_INLINE void to_int16(const float* x, int64_t count, float step, int16_t* to) {
  const f32x16 inverse = set1(step > 1e-37f ? 1.0f / step : 0.0f);
  for (int64_t i = 0; i < count; i += 16) store_i16(to + i, to_int(mul(load(x + i), inverse)));
}

LOWBIT_INLINE f32x16 load_scale16(const float* p) { return load(p); }
LOWBIT_INLINE f32x16 load_scale16(const uint16_t* p) { return load_f16(p); }

// Scales [token][group] as float32, zeros up to the next multiple of 16 tokens; prefetches those of the next split.
template <class T>
LOWBIT_INLINE void load_scales(const T* from, int64_t step, int64_t groups, int64_t tokens, T* gathered, float* to) {
  const int64_t count = tokens * groups, whole = count / 16 * 16;
  if (step == groups) {
    for (int64_t i = 0; i < whole; i += 16) __builtin_prefetch(from + i + kSplit * step);
  } else {
    for (int64_t t = 0; t < tokens; t++) {
      __builtin_prefetch(from + (t + kSplit) * step);
      for (int64_t g = 0; g < groups; g++) gathered[t * groups + g] = from[t * step + g];
    }
    from = gathered;
  }
  for (int64_t i = 0; i < whole; i += 16) store(to + i, load_scale16(from + i));
  T last[16] = {};
  for (int64_t i = whole; i < count; i++) last[i - whole] = from[i];
  if (whole < count) store(to + whole, load_scale16(last));
  for (int64_t i = round_up(count, 16); i < round_up(tokens, 16) * groups; i += 16) store(to + i, set1(0.0f));
}

// The scales of groups first..first + groups of kv head h. `gathered`: scratch, as large as `to`.
LOWBIT_INLINE void load_scales(const TensorView& scale, const SplitRange& at, int64_t h, int64_t first, int64_t groups,
                               float* gathered, float* to) {
  const int64_t step = scale.stride[2],
                base = at.b * scale.stride[0] + (at.kv_head + h) * scale.stride[1] + at.first * step + first;
  if (scale.dtype == DType::float32) load_scales(scale.as<const float>() + base, step, groups, at.count, gathered, to);
  else
    load_scales(scale.as<const uint16_t>() + base, step, groups, at.count, reinterpret_cast<uint16_t*>(gathered), to);
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

// to[row][token] = q[row] . code[token] * steps, for two tokens by four rows, or four by two. q: [16 columns][pair of
// rows][32 lanes]. scales: [token] for int8, [token][group] for int4, applied to the partial sums of the groups; same:
// all tokens are one and the same.
template <KvFormat kFormat, int kRows, int kColumns>
LOWBIT_INLINE void score_codes(const int16_t* q, const float* steps, const char* key, int64_t stride, int64_t padded,
                               const float* scales, bool same, float* to, int64_t to_stride) {
  constexpr int kPairs = kRows / 2, kTokens = 8 / kRows;
  constexpr int64_t kGroupBytes = kFormat == KvFormat::int8 ? kKvGroup : kKvGroup / 2;
  if constexpr (kColumns != 0) padded = kColumns;
  const int64_t groups = padded / kKvGroup, scale_stride = same ? 0 : groups;
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
        else
          sum = fma(to_float(add_pairs(add_pairs(zero<i32x16>(), w[j].low, low), w[j].high, high)),
                    set1(scales[j * scale_stride + g]), sum);
      });
    });
  };
  if constexpr (kColumns != 0) unroll<kColumns / kKvGroup>([&](auto i) { step(i); });
  else for (int64_t g = 0; g < groups; g++) step(g);
  f32x8 factor = load8(steps);
  if constexpr (kFormat == KvFormat::int8) factor = mul(factor, kRows == 2 ? repeat_four(scales) : repeat_two(scales));
  store_scores<kRows>(to, to_stride, mul(half_sums(acc[0], acc[1], acc[2], acc[3]), factor));
}

LOWBIT_INLINE i32x16 load_i32(const float* p) { return bits_of(load(p)); }
LOWBIT_INLINE void store_i32(float* p, i32x16 a) { store(p, float_of(a)); }

// 16 columns of out += pairs of tokens' codes times pairs of probabilities; p of row r starts at p + r * kSplit.
// zip(row, next row): pairs of codes. Prefetches kLines lines per four tokens.
template <int kRows, int kLines, class Zip>
LOWBIT_INLINE void add_code_columns(const int16_t* p, const char* row, int64_t stride, int64_t tokens,
                                    Matrix<float> out, LinesAhead& lines, Zip&& zip) {
  LinesAhead ahead = lines;  // a copy, in registers
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
  if (t < tokens) step(t, row, 0);  // the probability of a token past the end is 0
  unroll<kRows>([&](auto r) { store_i32(out.row(r), acc[r]); });
  lines = ahead;
}

template <KvFormat kFormat>
struct CodeKv {
  static constexpr bool kCodes = true;
  static constexpr bool kInt8 = kFormat == KvFormat::int8;
  using Element = int8_t;

  static void scores(const DecodeArgs& args, const TokenRows& keys, QueryRows q, int64_t rows, SplitMemory& memory,
                     const SplitRange& at) {
    const int64_t padded = q.columns, groups = kInt8 ? 1 : args.k_scale.size(3);
    const float* scales = memory.scales;
    for (int64_t h = 0; h < at.heads; h++)
      load_scales(args.k_scale, at, h, 0, groups, memory.gathered, memory.scales + h * kSplit * groups);
    with_columns(padded, [&](auto kColumns) {
      score_tokens<kv_row_bytes(kFormat, kColumns)>(
          keys, rows, memory, [=](auto kRows, int64_t h, int64_t r) __attribute__((always_inline)) {
            const int16_t* q_codes = q.codes + (h * q.head_rows + r) * padded;
            const float *q_steps = q.steps + (h * q.head_rows + r) * 2, *head_scales = scales + h * kSplit * groups;
            return [=](bool same, int64_t t, const char* key, int64_t stride, float* to, int64_t to_stride)
                       __attribute__((always_inline)) {
                         const float* token_scales = head_scales + t * groups;
                         score_codes<kFormat, kRows, kColumns>(q_codes, q_steps, key, stride, padded, token_scales,
                                                               same, to, to_stride);
                       };
          });
    });
  }

  // p[r][t] * v_scale[t] of kv head h as int16, for each group of columns that shares a scale.
  LOWBIT_INLINE static void weigh(const DecodeArgs& args, int64_t h, int64_t rows, SplitMemory& memory,
                                  const SplitRange& at) {
    const int64_t groups = args.v_scale.size(3), tokens = round_up(at.count, 16);
    for (int64_t g = 0; g < groups; g++) {
      load_scales(args.v_scale, at, h, g, 1, memory.gathered, memory.scales);
      const int64_t slot = (h * groups + g) * memory.head_rows;
      for (int64_t first = 0; first < rows; first += kRowTile) {
        const int64_t count = smaller(kRowTile, rows - first);
        i32x16 top[kRowTile];
        for (int64_t i = 0; i < count; i++) {
          const float* p = memory.scores.row(h * memory.head_rows + first + i);
          i32x16 bits = set1(int32_t{0});
          for (int64_t t = 0; t < tokens; t += 16) {
            const f32x16 weight = mul(load(p + t), load(memory.scales + t));
            store(memory.weighted + i * kSplit + t, weight);
            bits = larger_magnitude(bits, weight);
          }
          top[i] = bits;
        }
        for (int64_t i = 0; i < count; i++) {
          float& step = memory.steps[slot + first + i];
          step = int16_step(top[i]);
          to_int16(memory.weighted + i * kSplit, tokens, step, memory.weights + (slot + first + i) * kSplit);
        }
      }
    }
  }

  // Integer sums of weights times codes, times the step of (group, row).
  static void values(const DecodeArgs& args, const TokenRows& values, int64_t rows, SplitMemory& memory,
                     const SplitRange& at) {
    const int64_t padded = kv_padded(args.out.size(3)), groups = args.v_scale.size(3), group_columns = padded / groups;
    for (int64_t h = 0; h < at.heads; h++) weigh(args, h, rows, memory, at);
    visit_values(values, rows,
                 [&](auto kRows, int64_t h, int64_t r, int64_t t, int64_t count, LinesAhead& ahead)
                     __attribute__((always_inline)) {
                       for (int64_t c = 0; c < padded; c += 16) {
                         const int16_t* weights =
                             memory.weights + ((h * groups + c / group_columns) * memory.head_rows + r) * kSplit + t;
                         const Matrix<float> out{memory.out.row(h * memory.head_rows + r) + c, memory.out.stride};
                         const char* row = values.row(h, t) + (kInt8 ? c : c / 32 * 16);
                         auto add = [&](auto kLines, auto&& zip) __attribute__((always_inline)) {
                           add_code_columns<kRows, kLines>(weights, row, values.stride, count, out, ahead, zip);
                         };
                         auto bytes = [](const char* a) { return reinterpret_cast<const uint8_t*>(a); };
                         constexpr std::integral_constant<int, 0> kNone;
                         constexpr std::integral_constant<int, 1> kOne;  // 4 tokens of 16 bytes
                         if constexpr (kInt8)
                           add(kOne, [](const char* a, const char* b) {
                             return zip_i8(reinterpret_cast<const int8_t*>(a), reinterpret_cast<const int8_t*>(b));
                           });
                         else if (c % 32)
                           add(kNone, [&](const char* a, const char* b) { return zip_i4<true>(bytes(a), bytes(b)); });
                         else
                           add(kOne, [&](const char* a, const char* b) { return zip_i4<false>(bytes(a), bytes(b)); });
                       }
                     });
    for (int64_t h = 0; h < at.heads; h++)
      for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < padded; c += 16) {
          float* to = memory.out.row(h * memory.head_rows + r) + c;
          store(to, mul(to_float(load_i32(to)),
                        set1(memory.steps[(h * groups + c / group_columns) * memory.head_rows + r])));
        }
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
