// SPDX-License-Identifier: Apache-2.0
// Flash-decoding (Dao and others, 2023): a CTA takes a split of the keys of one kv head and all queries that share it,
// up to 32 rows; a second kernel adds the splits in their order, if there is more than one. Tokens are the rows of the
// tensor cores' products, queries their 8 columns, so that every code is decoded once. Scales meet scores and
// probabilities, not codes.
#pragma once

#include "cuda/attention/mods.cuh"
#include "cuda/decode/cache.cuh"
#include "cuda/decode/splits.cuh"

namespace lowbit::cuda {

LOWBIT_INLINE float bias_of(const DecodeCall& call, int64_t b, int64_t h, int64_t l, int64_t k) {
  const int64_t at = b * call.bias_stride[0] + h * call.bias_stride[1] + l * call.bias_stride[2] +
                     k * call.bias_stride[3];
  if (call.bias_dtype == DType::boolean) return static_cast<const uint8_t*>(call.bias)[at] ? 0.0f : minus_infinity();
  if (call.bias_dtype == DType::float64) return static_cast<float>(static_cast<const double*>(call.bias)[at]);
  return load_real(call.bias, call.bias_dtype, at);
}

template <DType kCache, int kGroups, int kVGroups, int kParts, int kTiles, class Mods>
struct Decode {
  static constexpr DecodeShape kShape{kCache, kGroups, kVGroups, kParts, kTiles};
  static constexpr DType kDtype = kProduct<kCache>;
  static constexpr int kScoreStride = kShape.score_stride();
  static constexpr int kRowsOfWarp = kShape.rows() / kDecodeWarps;
  static constexpr int kGroupsOfWarp = (kVGroups + kDecodeWarps - 1) / kDecodeWarps;
  static constexpr int kScales = kShape.scales(), kVScales = kShape.v_scales();
  struct Shared {
    TokenTile<kShape.row_bytes()> keys;
    TokenTile<kShape.v_row_bytes()> values;
    alignas(16) uint2 query[kParts][kGroups][2][kTiles][32];  // [part][group][step][tile][lane]
    float k_scale[kShape.scale_floats(kScales)], v_scale[kShape.scale_floats(kVScales)];
    float scores[kShape.rows()][kScoreStride], shrink[kShape.rows()], factor[kShape.rows()];  // of scores
  };

  const DecodeCall& call;
  Shared& shared;
  int b, kv_head, row0, rows;  // rows of the kv head, that are there
  float largest[kRowsOfWarp], total[kRowsOfWarp];
  float out[kGroupsOfWarp][2][kTiles][4];  // [group][half of it][tile of rows]

  // Keys that the queries of this CTA see, which may be of several heads.
  LOWBIT_INLINE KeyRange seen() const {
    const int last = row0 + rows - 1;
    if (row0 / call.length != last / call.length) return call.seen(call.end, 0, call.length - 1);
    return call.seen(call.end, row0 % call.length, last % call.length);
  }

  // Divides a row by a power of 2 that brings its largest near 1, and returns that: its products with codes, which are
  // larger than keys, stay finite.
  LOWBIT_INLINE static float power_below(float (&x)[kGroups]) {
    int32_t bits = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) bits = Largest()(bits, __float_as_int(x[g]) & INT32_MAX);
    const int exponent = of_warp(Largest(), bits) >> 23, bounded = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
#pragma unroll
    for (int g = 0; g < kGroups; g++) x[g] *= __int_as_float((254 - bounded) << 23);
    return __int_as_float(bounded << 23);
  }

  LOWBIT_INLINE void load_queries() {
    auto* halves = reinterpret_cast<uint16_t*>(shared.query);
    const KeySlot slot = key_slot<kCache>(lane_of_warp());
    for (int r = warp_of_cta(); r < kShape.rows(); r += kDecodeWarps) {
      float x[kGroups];
      const int row = row0 + (r < rows ? r : rows - 1), h = kv_head * call.group + row / call.length;
      load_row(x, call.q.data, call.q_dtype, b * call.q.batch + h * call.q.head + row % call.length * call.q.row,
               r < rows ? call.columns : 0);
      if (call.rotated) rotate(x);
      float factor = 1;
      if constexpr (kShape.codes()) factor = power_below(x);
      if (lane_of_warp() == 0) shared.factor[r] = factor * call.scale;
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        uint32_t part[kParts];
        cut_pair<kDtype>(x[g], 0.0f, part);
#pragma unroll
        for (int p = 0; p < kParts; p++) {
          const int at = (((p * kGroups + g) * 2 + slot.step) * kTiles + r / 8) * 32 + r % 8 * 4 + slot.t;
          halves[at * 4 + slot.half] = static_cast<uint16_t>(part[p]);
        }
      }
    }
  }

  // Scores of the 16 tokens of this warp.
  LOWBIT_INLINE void multiply_keys(float (&s)[kTiles][4]) const {
    const int lane = lane_of_warp(), t = lane % 4, token = warp_of_cta() * 16 + lane / 4;
    const char *first = shared.keys.row(token), *second = shared.keys.row(token + 8);
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[n][i] = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      uint32_t a[2][2], c[2][2];
      load_key<kCache>(a, first + g * kShape.group_bytes(), t);
      load_key<kCache>(c, second + g * kShape.group_bytes(), t);
#pragma unroll
      for (int n = 0; n < kTiles; n++) {
        float sum[4] = {};
        if constexpr (kScales <= 1)
#pragma unroll
          for (int i = 0; i < 4; i++) sum[i] = s[n][i];
#pragma unroll
        for (int step = 0; step < 2; step++)
#pragma unroll
          for (int p = 0; p < kParts; p++) {
            const uint2 q = shared.query[p][g][step][n][lane];
            multiply_16<kDtype>(sum, {a[step][0], c[step][0], a[step][1], c[step][1]}, {q.x, q.y});
          }
#pragma unroll
        for (int i = 0; i < 4; i++)
          if constexpr (kScales <= 1) s[n][i] = sum[i];
          else s[n][i] = __fmaf_rn(sum[i], shared.k_scale[(token + i / 2 * 8) * kScales + g], s[n][i]);
      }
    }
  }

  LOWBIT_INLINE float modified(float product, int r, int64_t k) const {
    const int row = row0 + r, h = kv_head * call.group + row / call.length, l = row % call.length;
    const int64_t at = call.position + l;
    if ((call.causal && k > at) || (call.window > 0 && k <= at - call.window)) return minus_infinity();
    float s = product * shared.factor[r];
    if constexpr (Mods::kScore) s = Mods::score(call, s, b, h, static_cast<int>(at), static_cast<int>(k));
    if constexpr (Mods::kMask) s = Mods::mask(call, s, b, h, static_cast<int>(at), static_cast<int>(k));
    return call.bias ? s + bias_of(call, b, h, l, k) : s;
  }

  LOWBIT_INLINE void store_scores(const float (&s)[kTiles][4], int64_t k0, int tokens) const {
    const int lane = lane_of_warp();
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int token = warp_of_cta() * 16 + lane / 4 + i / 2 * 8, r = n * 8 + lane % 4 * 2 + i % 2;
        float score = minus_infinity();
        if (token < tokens && r < rows)
          score = modified(kScales == 1 ? s[n][i] * shared.k_scale[token] : s[n][i], r, k0 + token);
        shared.scores[r][token] = score;
      }
  }

  // Scores to powers of e in relation to the largest so far.
  LOWBIT_INLINE void softmax() {
    const int lane = lane_of_warp();
#pragma unroll
    for (int j = 0; j < kRowsOfWarp; j++) {
      float* row = shared.scores[j * kDecodeWarps + warp_of_cta()];
      const float first = row[lane], second = row[lane + 32];
      const float top = fmaxf(largest[j], of_warp(LargerFloat(), fmaxf(first, second)));
      const float base = top == minus_infinity() ? 0.0f : top, shrink = power_of_2((largest[j] - base) * kLog2e);
      const float p = power_of_2((first - base) * kLog2e), of_second = power_of_2((second - base) * kLog2e);
      row[lane] = p, row[lane + 32] = of_second;
      total[j] = total[j] * shrink + of_warp(FloatTotal(), p + of_second), largest[j] = top;
      if (lane == 0) shared.shrink[j * kDecodeWarps + warp_of_cta()] = shrink;
    }
  }

  LOWBIT_INLINE float weight(int row, int token, int group) const {
    const float p = shared.scores[row][token];
    if constexpr (kVScales == 0) return p;
    else return p * shared.v_scale[token * kVScales + (kVScales == 1 ? 0 : group)];
  }

  // body(sum, row, i) for the sums of a group that this lane has; i: where their columns lie (value_column).
  template <class Body>
  LOWBIT_INLINE static void for_each_sum(float (&of_group)[2][kTiles][4], Body body) {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          body(of_group[half][n][i], n * 8 + lane_of_warp() % 4 * 2 + i % 2, 2 * half + i / 2);
  }

  LOWBIT_INLINE void multiply_values() {
    const int lane = lane_of_warp(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < kGroupsOfWarp; j++) {
      const int group = j * kDecodeWarps + warp_of_cta();
      if (group >= kVGroups) break;
      for_each_sum(out[j], [&](float& sum, int row, int) { sum *= shared.shrink[row]; });
#pragma unroll
      for (int k = 0; k < kKeyTile; k += 16) {
        uint32_t a[4], c[4];  // of tokens t and t + 4, t + 8 and t + 12
        const auto row = [&](int i) { return shared.values.row(k + t + 4 * i) + group * kShape.group_bytes(); };
        load_values<kCache>(a, row(0), row(1), g), load_values<kCache>(c, row(2), row(3), g);
#pragma unroll
        for (int n = 0; n < kTiles; n++) {
          uint32_t p[2][2];  // [pair of tokens][part]
#pragma unroll
          for (int i = 0; i < 2; i++)
            cut_pair<kDtype>(weight(n * 8 + g, k + t + 8 * i, group), weight(n * 8 + g, k + t + 8 * i + 4, group),
                             p[i]);
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int part = 0; part < 2; part++)
              multiply_16<kDtype>(out[j][half][n], {a[2 * half], a[2 * half + 1], c[2 * half], c[2 * half + 1]},
                                  {p[0][part], p[1][part]});
        }
      }
    }
  }

  LOWBIT_INLINE void run(int64_t first, int64_t end) {
    if (first >= end) return;
    constexpr int64_t kSize = kShape.codes() ? 1 : 2;
    const char *keys = static_cast<const char*>(call.k.data) + (b * call.k.batch + kv_head * call.k.head) * kSize,
               *values = static_cast<const char*>(call.v.data) + (b * call.v.batch + kv_head * call.v.head) * kSize;
    const int64_t k_scale = b * call.k.scale_batch + kv_head * call.k.scale_head,
                  v_scale = b * call.v.scale_batch + kv_head * call.v.scale_head;
    ScalesAhead<kScales> k_ahead;
    ScalesAhead<kVScales> v_ahead;
    const auto fetch_keys = [&](int64_t from) {
      const auto tokens = static_cast<int>(smaller(kKeyTile, end - from));
      shared.keys.template copy<kGroups * kShape.group_bytes() / 16>(
          call.k, keys + from * call.k.row * kSize, call.k.row * kSize, tokens);
      k_ahead.fetch(call.k, k_scale + from * call.k.scale_row, tokens);
    };
    fetch_keys(first);
    for (int64_t from = first; from < end; from += kKeyTile) {
      const auto tokens = static_cast<int>(smaller(kKeyTile, end - from));
      wait_for_copies();
      k_ahead.store(shared.k_scale);
      __syncthreads();  // keys are there, and every thread is done with the values and scores before
      shared.values.template copy<kVGroups * kShape.group_bytes() / 16>(
          call.v, values + from * call.v.row * kSize, call.v.row * kSize, tokens);
      v_ahead.fetch(call.v, v_scale + from * call.v.scale_row, tokens);
      float s[kTiles][4];
      multiply_keys(s);
      store_scores(s, from, tokens);
      wait_for_copies();
      v_ahead.store(shared.v_scale);
      __syncthreads();  // scores and values are there, and every thread is done with the keys
      if (from + kKeyTile < end) fetch_keys(from + kKeyTile);
      softmax();
      __syncthreads();  // probabilities are there
      multiply_values();
    }
  }

  // Row 0 of this CTA among those of all heads.
  LOWBIT_INLINE int64_t first_row() const {
    return (static_cast<int64_t>(b) * call.kv_heads + kv_head) * call.group * call.length + row0;
  }

  // body(sum, row, column) for the sums of this lane that are there.
  template <class Body>
  LOWBIT_INLINE void for_each_result(Body body) {
#pragma unroll
    for (int j = 0; j < kGroupsOfWarp; j++) {
      const int group = j * kDecodeWarps + warp_of_cta();
      if (group >= kVGroups) break;
      for_each_sum(out[j], [&](float sum, int row, int i) {
        if (row < rows) body(sum, row, group * 32 + value_column<kCache>(lane_of_warp() / 4, i));
      });
    }
  }

  // Of the only split: what `combine` would do with one, without memory for it (a prompt of 32k tokens and 32 heads
  // had 32 GiB of partial results).
  LOWBIT_INLINE void finish_alone() {
    __syncthreads();  // every thread is done with shrink and factor
#pragma unroll
    for (int j = 0; j < kRowsOfWarp; j++) {
      const int r = j * kDecodeWarps + warp_of_cta();
      if (r >= rows || lane_of_warp() != 0) continue;
      const Softmax all(call, kv_head * call.group + (row0 + r) / call.length, largest[j]);
      const float factor = all.factor(largest[j], total[j]), sum = all.of_sink + fmaxf(factor, 0.0f) * total[j];
      shared.shrink[r] = factor, shared.factor[r] = inverse(sum);
      all.store_lse(call, first_row() + r, sum);
    }
    __syncthreads();  // factors are there
    for_each_result([&](float sum, int r, int column) {
      const int row = row0 + r, h = kv_head * call.group + row / call.length, l = row % call.length;
      const float factor = shared.shrink[r], value = factor < 0.0f ? 0.0f : factor * sum;
      if (column < call.v_columns)
        store_real(call.out.data, call.out_dtype,
                   b * call.out.batch + h * call.out.head + l * call.out.row + column, value * shared.factor[r]);
    });
  }

  LOWBIT_INLINE void finish(int64_t split) {
    const int lane = lane_of_warp();
    const int64_t first = first_row();
#pragma unroll
    for (int j = 0; j < kRowsOfWarp; j++) {
      const int r = j * kDecodeWarps + warp_of_cta();
      if (r >= rows || lane != 0) continue;
      call.largest[(first + r) * call.splits + split] = largest[j];
      call.total[(first + r) * call.splits + split] = total[j];
    }
    for_each_result([&](float sum, int row, int column) {
      call.partial[((first + row) * call.splits + split) * kVGroups * 32 + column] = sum;
    });
  }
};

template <DType kCache, int kGroups, int kVGroups, int kParts, int kTiles, class Mods>
LOWBIT_INLINE void decode(const DecodeCall& call) {
  using D = Decode<kCache, kGroups, kVGroups, kParts, kTiles, Mods>;
  LOWBIT_DYNAMIC_SHARED(typename D::Shared, shared);
  static_assert(sizeof(typename D::Shared) == D::kShape.bytes());
  int64_t at = blockIdx.x;
  const int64_t split = at % call.splits;
  at /= call.splits;
  const int block = static_cast<int>(at % call.row_blocks), head = static_cast<int>(at / call.row_blocks);
  const int row0 = block * D::kShape.rows(), left = call.group * call.length - row0;
  D of{.call = call, .shared = shared, .b = head / call.kv_heads, .kv_head = head % call.kv_heads, .row0 = row0,
       .rows = left < D::kShape.rows() ? left : D::kShape.rows(), .largest = {}, .total = {}, .out = {}};
#pragma unroll
  for (int j = 0; j < D::kRowsOfWarp; j++) of.largest[j] = minus_infinity();
  of.load_queries();
  const KeyRange seen = of.seen();
  const int64_t first = call.first + split * call.split;
  of.run(larger(first, seen.first), smaller(seen.end, first + call.split));
  if (call.splits == 1) of.finish_alone();
  else of.finish(split);
  check_fault<Mods>(call);
}

LOWBIT_INLINE void clear_fault(const DecodeCall& call) {
  if (threadIdx.x == 0) *call.fault = 0;
}

}  // namespace lowbit::cuda
