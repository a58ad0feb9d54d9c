// SPDX-License-Identifier: Apache-2.0
// Flash-decoding (Dao and others, 2023): a CTA takes a split of the keys of one kv head and all queries that share it,
// up to 16 rows; if there are several splits, a second kernel combines them in order. Each warp has its own tiles of
// tokens, which it copies ahead, and waits for no other warp until the end. Queries are the rows of its first product,
// so that probabilities are laid out as the second one takes them, as columns beside values that are transposed on
// loading. Every code is decoded once for 16 rows. Scales are applied to scores and probabilities instead of codes.
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
  return load_as_float(call.bias, call.bias_dtype, at);
}

// a / b, where b is often 1: a division takes 25 instructions.
LOWBIT_INLINE int quotient(int a, int b) { return b == 1 ? a : a / b; }

template <DType kCache, int kGroups, int kVGroups, int kParts, int kTiles, class Mods>
struct Decode {
  static constexpr DecodeShape kShape{kCache, kGroups, kVGroups, kParts, kTiles};
  static constexpr DType kDtype = kProduct<kCache>;
  static constexpr int kTokens = kShape.tokens(), kSteps = kTokens / 16;
  static constexpr int kScales = kShape.scales(), kVScales = kShape.v_scales();
  // A product has 16 rows of queries: two tiles; both parts of one tile; or one tile, with the other half unused.
  static constexpr int kRowTiles = (kTiles + 1) / 2;
  static constexpr int kQueryParts = kTiles == 1 ? 1 : kParts;
  struct WarpTiles {
    alignas(16) char keys[kTokens * kShape.row_bytes()], values[kTokens * kShape.v_row_bytes()];
    float k_scale[DecodeShape::at_least_one(kScales)][kShape.scale_stride()];
    float v_scale[DecodeShape::at_least_one(kVScales)][kShape.scale_stride()];
  };
  struct Shared {
    uint4 query[kQueryParts][kRowTiles][kGroups][2][32];  // [..][step][lane]
    union {
      WarpTiles tiles[kDecodeWarps];
      uint4 sums[kDecodeWarps][kShape.sum_units()][32];
    };
    float factor[kShape.rows()], shrink[kShape.rows()];  // factor of scores; factor of accumulators
    alignas(16) float largest[kShape.rows()][kDecodeWarps], total[kShape.rows()][kDecodeWarps];
  };
  static constexpr bool kAsksNothing = !Mods::kScore && !Mods::kMask;
  using Scores = float[kRowTiles][kTokens / 8][4];

  const DecodeCall& call;
  Shared& shared;
  int b, kv_head, row0, rows;  // rows of the kv head that exist
  float largest[kTiles], total[kTiles];  // per row lane / 4 of each tile; total of this lane's tokens
  float out[kVGroups][2][kTiles][4];     // [group][half][tile of rows]: columns by rows

  LOWBIT_INLINE WarpTiles& mine() const { return shared.tiles[warp_of_cta()]; }
  // The first and the last query of this CTA, possibly of several heads.
  LOWBIT_INLINE int first_query() const { return is_of_one_head() ? query_of(row0).l : 0; }
  LOWBIT_INLINE int last_query() const { return is_of_one_head() ? query_of(row0 + rows - 1).l : call.length - 1; }
  LOWBIT_INLINE bool is_of_one_head() const { return query_of(row0).h == query_of(row0 + rows - 1).h; }

  // The head and the query of a row of the kv head.
  struct Query {
    int h, l;
  };
  LOWBIT_INLINE Query query_of(int row) const {
    const int of_group = quotient(row, call.length);
    return {kv_head * call.group + of_group, row - of_group * call.length};
  }

  // Divides a row by a power of 2 that brings its largest near 1, and returns that power: its products with codes,
  // which are larger than keys, stay finite.
  LOWBIT_INLINE static float power_below(float (&x)[kGroups]) {
    int32_t bits = 0;
#pragma unroll
    for (int g = 0; g < kGroups; g++) bits = Largest()(bits, __float_as_int(x[g]) & INT32_MAX);
    const int exponent = of_warp(Largest(), bits) >> 23, bounded = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
#pragma unroll
    for (int g = 0; g < kGroups; g++) x[g] *= __int_as_float((254 - bounded) << 23);
    return __int_as_float(bounded << 23);
  }

  // Missing rows keep the old contents of memory: their results are not stored.
  LOWBIT_INLINE void load_queries() {
    auto* halves = reinterpret_cast<uint16_t*>(shared.query);
    const KeySlot slot = key_slot<kCache>(lane_of_warp());
    for (int r = warp_of_cta(); r < rows; r += kDecodeWarps) {
      float x[kGroups];
      const Query at = query_of(row0 + r);
      load_row(x, call.q.data, call.q_dtype, b * call.q.batch + at.h * call.q.head + at.l * call.q.row, call.columns);
      if (call.rotated) rotate_query(x);
      float factor = 1;
      if constexpr (kShape.codes()) factor = power_below(x);
      if (lane_of_warp() == 0) shared.factor[r] = factor * call.scale;
#pragma unroll
      for (int g = 0; g < kGroups; g++) {
        uint32_t part[kParts];
        cut_pair<kDtype>(x[g], 0.0f, part);
#pragma unroll
        for (int p = 0; p < kParts; p++) {
          const int tile = kTiles == 1 ? 0 : p * kRowTiles + r / 16, upper = kTiles == 1 ? p : r / 8 % 2;
          const int lane = ((tile * kGroups + g) * 2 + slot.step) * 32 + r % 8 * 4 + slot.t;
          halves[lane * 8 + (slot.half / 2 * 2 + upper) * 2 + slot.half % 2] = static_cast<uint16_t>(part[p]);
        }
      }
    }
  }

  // The scales of two adjacent tokens that this lane has results for.
  template <int kRows>
  LOWBIT_INLINE static void load_scales(float (&two)[2], const float (&scale)[kRows][kShape.scale_stride()], int group,
                                        int n) {
    const uint2 words =
        *reinterpret_cast<const uint2*>(scale[kRows == 1 ? 0 : group] + n * 8 + lane_of_warp() % 4 * 2);
    two[0] = __uint_as_float(words.x), two[1] = __uint_as_float(words.y);
  }

  // Products of all rows with the keys of a tile, scaled.
  LOWBIT_INLINE void multiply_keys(Scores& s) const {
    constexpr int kUnroll = kShape.codes() ? 2 : kGroups;  // codes of all groups would not fit into 128 registers
    const int lane = lane_of_warp();
    const char* keys = mine().keys + lane / 4 * kShape.row_bytes();
    clear(s);
#pragma unroll kUnroll
    for (int g = 0; g < kGroups; g++)
#pragma unroll
      for (int n = 0; n < kTokens / 8; n++) {
        uint32_t key[2][2];
        load_key<kCache>(key, keys + n * 8 * kShape.row_bytes() + g * kShape.group_bytes(), lane % 4);
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
          float sum[4] = {};
          if constexpr (kScales <= 1)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[i] = s[m][n][i];
#pragma unroll
          for (int step = 0; step < 2; step++)
#pragma unroll
            for (int p = 0; p < kQueryParts; p++) {
              const uint4 query = shared.query[p][m][g][step][lane];
              multiply_16<kDtype>(sum, {query.x, query.y, query.z, query.w}, key[step]);
            }
          float scale[2] = {1, 1};
          if constexpr (kScales > 1) load_scales(scale, mine().k_scale, g, n);
#pragma unroll
          for (int i = 0; i < 4; i++) s[m][n][i] = kScales <= 1 ? sum[i] : __fmaf_rn(sum[i], scale[i % 2], s[m][n][i]);
        }
      }
#pragma unroll
    for (int n = 0; n < kTokens / 8; n++) {
      float scale[2] = {1, 1};
      if constexpr (kScales == 1) load_scales(scale, mine().k_scale, 0, n);
#pragma unroll
      for (int m = 0; m < kRowTiles; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if constexpr (kTiles == 1 && kParts == 2)
            if (i < 2) s[m][n][i] += s[m][n][i + 2];
          s[m][n][i] *= scale[i % 2];
        }
    }
  }

  LOWBIT_INLINE float modified(float s, const Query& query, int64_t k) const {
    const int64_t at = call.position + query.l;
    if ((call.causal && k > at) || (call.window > 0 && k <= at - call.window)) return minus_infinity();
    if constexpr (Mods::kScore) s = Mods::score(call, b, query.h)(s, static_cast<int>(at), static_cast<int>(k));
    if constexpr (Mods::kMask) s = Mods::mask(call, b, query.h)(s, static_cast<int>(at), static_cast<int>(k));
    return call.bias ? s + bias_of(call, b, query.h, query.l, k) : s;
  }

  // Calls body(score, token) for this lane's scores of a tile of rows.
  template <class Body>
  LOWBIT_INLINE static void for_each_score(Scores& s, int tile, Body body) {
#pragma unroll
    for (int n = 0; n < kTokens / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++)
        body(s[tile / 2][n][tile % 2 * 2 + i], n * 8 + lane_of_warp() % 4 * 2 + i);
  }

  // Turns products into scores. is_plain: no row needs a check for any of these tokens.
  LOWBIT_INLINE void make_scores(Scores& s, int64_t from, int tokens, bool is_plain) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      const int r = tile * 8 + lane_of_warp() / 4;
      const float factor = shared.factor[r];
      for_each_score(s, tile, [&](float& score, int) { score *= factor; });
      if (is_plain) continue;
      const Query query = query_of(row0 + r);
      for_each_score(s, tile, [&](float& score, int token) {
        score = token < tokens && r < rows ? modified(score, query, from + token) : minus_infinity();
      });
    }
  }

  // Turns scores into powers of e relative to the largest so far, and rescales the accumulators.
  LOWBIT_INLINE void softmax(Scores& s) {
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float top = largest[tile], sum = 0;
      for_each_score(s, tile, [&](float& score, int) { top = fmaxf(top, score); });
      top = fmaxf(top, __shfl_xor_sync(kWarp, top, 1)), top = fmaxf(top, __shfl_xor_sync(kWarp, top, 2));
      const float base = top == minus_infinity() ? 0.0f : top, shrink = power_of_2((largest[tile] - base) * kLog2e);
      for_each_score(s, tile, [&](float& score, int) { sum += score = power_of_2((score - base) * kLog2e); });
      total[tile] = total[tile] * shrink + sum, largest[tile] = top;
      const int row = lane_of_warp() % 4 * 8;  // the lane with row 2t of the tile
      const float of_columns[2] = {__shfl_sync(kWarp, shrink, row), __shfl_sync(kWarp, shrink, row + 4)};
#pragma unroll
      for (int g = 0; g < kVGroups; g++)
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int i = 0; i < 4; i++) out[g][half][tile][i] *= of_columns[i % 2];
    }
  }

  // Probabilities of 16 tokens, times the scales of a group of values, as the right factor: [tile][part].
  using Weights = uint32_t[kTiles][2][2];
  LOWBIT_INLINE void make_weights(Weights& weights, const Scores& s, int group, int step) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float scale[2] = {1, 1};
      if constexpr (kVScales > 0) load_scales(scale, mine().v_scale, group, 2 * step + i);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile++) {
        const float* p = s[tile / 2][2 * step + i] + tile % 2 * 2;
        uint32_t part[2];
        cut_pair<kDtype>(p[0] * scale[0], p[1] * scale[1], part);
        weights[tile][0][i] = part[0], weights[tile][1][i] = part[1];
      }
    }
  }

  LOWBIT_INLINE void multiply_values(const Scores& s) {
    Weights weights[kSteps];
#pragma unroll
    for (int g = 0; g < kVGroups; g++) {
      uint32_t a[kSteps][2][4];
      load_values<kCache, kSteps, kShape.v_row_bytes()>(a, mine().values, g);
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        if (kVScales > 1 || g == 0) make_weights(weights[step], s, g, step);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int tile = 0; tile < kTiles; tile++)
#pragma unroll
            for (int part = 0; part < 2; part++)
              multiply_16<kDtype>(out[g][half][tile], a[step][half], weights[step][tile][part]);
      }
    }
  }

  // The keys from `first` to `end` seen by these queries. Products synchronize the lanes of the warp: after them, the
  // memory that they read may be overwritten.
  LOWBIT_INLINE void run(int64_t first, int64_t end) {
    const KeyRange seen = call.seen(call.end, first_query(), last_query()),
                   by_all = call.seen_by_all(call.end, first_query(), last_query());
    first = larger(first, seen.first);
    const auto from_first = [&](int64_t key) { return static_cast<int>(larger(0, smaller(key, end) - first)); };
    const int keys_of_cta = from_first(seen.end), plain_first = from_first(by_all.first),
              plain_end = kAsksNothing && !call.bias ? from_first(by_all.end) : 0;
    const auto tokens_from = [&](int from) { return keys_of_cta - from < kTokens ? keys_of_cta - from : kTokens; };
    int from = warp_of_cta() * kTokens;
    RowsAhead<kShape, false> keys(call.k, b, kv_head, first + from);
    RowsAhead<kShape, true> values(call.v, b, kv_head, first + from);
    keys.copy(mine().keys, tokens_from(from)), values.copy(mine().values, tokens_from(from));
    load_queries();
    __syncthreads();  // queries have arrived
    for (; from < keys_of_cta; from += kDecodeWarps * kTokens) {
      const int next = tokens_from(from + kDecodeWarps * kTokens);
      Scores s;
      wait_for_groups<1>();
      keys.store_scales(mine().k_scale[0]);
      __syncwarp();  // keys have arrived
      multiply_keys(s);
      keys.copy(mine().keys, next);
      make_scores(s, first + from, tokens_from(from), from >= plain_first && from + kTokens <= plain_end);
      softmax(s);
      wait_for_groups<1>();
      values.store_scales(mine().v_scale[0]);
      __syncwarp();  // values have arrived
      multiply_values(s);
      values.copy(mine().values, next);
    }
  }

  // Index of row 0 of this CTA among the rows of all heads.
  LOWBIT_INLINE int64_t first_row() const {
    return (static_cast<int64_t>(b) * call.kv_heads + kv_head) * call.group * call.length + row0;
  }

  // The largest score of a row over the keys of this CTA.
  LOWBIT_INLINE float row_largest(int r) const {
    const uint4 of = *reinterpret_cast<const uint4*>(shared.largest[r]);
    return fmaxf(fmaxf(__uint_as_float(of.x), __uint_as_float(of.y)),
                 fmaxf(__uint_as_float(of.z), __uint_as_float(of.w)));
  }

  // For a single split: does the work of `combine` without memory for partial results (32 GiB for a prompt of 32k
  // tokens and 32 heads).
  LOWBIT_INLINE void finish_row(int r, int split) {
    const float top = row_largest(r);
    float total = 0;  // sum of powers relative to the largest
#pragma unroll
    for (int w = 0; w < kDecodeWarps; w++)
      total += power_of_2((shared.largest[r][w] - softmax_base(top)) * kLog2e) * shared.total[r][w];
    if (call.splits > 1) {
      call.largest[(first_row() + r) * call.splits + split] = top;
      call.total[(first_row() + r) * call.splits + split] = total;
      return;
    }
    const Softmax all(call, query_of(row0 + r).h, top);
    const float factor = all.factor(top), sum = all.of_sink + factor * total;
    shared.shrink[r] = factor * inverse(sum);
    all.store_lse(call, first_row() + r, sum);
  }

  // Accumulators of all warps: units warp, warp + 4 ... have the same rows, 2t and 2t + 1 of a tile.
  LOWBIT_INLINE void store_sums(int split) const {
    static_assert(kDecodeWarps % kTiles == 0);
    constexpr int kUnits = kShape.sum_units(), kEach = (kUnits + kDecodeWarps - 1) / kDecodeWarps;
    const int lane = lane_of_warp(), g = lane / 4, warp = warp_of_cta(), r0 = warp % kTiles * 8 + lane % 4 * 2;
    float sums[kEach][4] = {};
#pragma unroll
    for (int j = 0; j < kEach; j++)
#pragma unroll
      for (int w = 0; w < kDecodeWarps; w++) {
        if (j * kDecodeWarps + warp >= kUnits) break;
        const uint4 of = shared.sums[w][j * kDecodeWarps + warp][lane];
        sums[j][0] += __uint_as_float(of.x), sums[j][1] += __uint_as_float(of.y);
        sums[j][2] += __uint_as_float(of.z), sums[j][3] += __uint_as_float(of.w);
      }
    // calls body(sum, row, column)
    const auto for_each_sum = [&](auto body) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < kEach; j++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int unit = j * kDecodeWarps / kTiles + warp / kTiles;  // unit within a tile
            if (r0 + i < rows && unit < 2 * kVGroups)
              body(sums[j][2 * half + i], r0 + i, unit / 2 * 32 + value_column<kCache>(g, unit % 2 * 2 + half));
          }
    };
    if (call.splits > 1) {
      float* partial = call.partial + (first_row() * call.splits + split) * (kVGroups * 32);
      for_each_sum([&](float sum, int r, int column) { partial[r * call.splits * (kVGroups * 32) + column] = sum; });
    } else {
      for_each_sum([&](float sum, int r, int column) {
        const Query at = query_of(row0 + r);
        if (column < call.v_columns)
          store_from_float(call.out.data, call.out_dtype,
                     b * call.out.batch + at.h * call.out.head + at.l * call.out.row + column, sum * shared.shrink[r]);
      });
    }
  }

  // Adds the accumulators of the warps. A part of a row that saw no key is ignored, even if it is nan.
  LOWBIT_INLINE void finish(int split) {
    const int lane = lane_of_warp(), g = lane / 4, t = lane % 4, warp = warp_of_cta();
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float sum = total[tile];
      sum += __shfl_xor_sync(kWarp, sum, 1), sum += __shfl_xor_sync(kWarp, sum, 2);
      if (t == 0) shared.largest[tile * 8 + g][warp] = largest[tile], shared.total[tile * 8 + g][warp] = sum;
    }
    __syncthreads();  // totals have arrived, and all warps are done with their tiles
    if (static_cast<int>(threadIdx.x) < rows) finish_row(static_cast<int>(threadIdx.x), split);
#pragma unroll
    for (int tile = 0; tile < kTiles; tile++) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int r = tile * 8 + 2 * t + i;
        const float top = shared.largest[r][warp];
        factor[i] = power_of_2((top - softmax_base(row_largest(r))) * kLog2e);
        if (top == minus_infinity() && shared.total[r][warp] == 0.0f)
#pragma unroll
          for (int j = 0; j < kVGroups * 2; j++) out[j / 2][j % 2][tile][i] = out[j / 2][j % 2][tile][2 + i] = 0;
      }
#pragma unroll
      for (int j = 0; j < kVGroups * 2; j++) {
        uint32_t sum[4];
#pragma unroll
        for (int i = 0; i < 4; i++) sum[i] = __float_as_uint(factor[i % 2] * out[j / 2][j % 2][tile][i]);
        shared.sums[warp][j * kTiles + tile][lane] = {sum[0], sum[1], sum[2], sum[3]};
      }
    }
    __syncthreads();  // accumulators have arrived
    store_sums(split);
  }
};

template <DType kCache, int kGroups, int kVGroups, int kParts, int kTiles, class Mods>
LOWBIT_INLINE void decode(const DecodeCall& call) {
  using D = Decode<kCache, kGroups, kVGroups, kParts, kTiles, Mods>;
  LOWBIT_DYNAMIC_SHARED(typename D::Shared, shared);
  static_assert(sizeof(typename D::Shared) == D::kShape.bytes());
  const int at = static_cast<int>(blockIdx.x), tile = quotient(at, call.splits), split = at - tile * call.splits,
            head = quotient(tile, call.row_blocks), row0 = (tile - head * call.row_blocks) * D::kShape.rows(),
            left = call.group * call.length - row0, b = quotient(head, call.kv_heads);
  D of{.call = call, .shared = shared, .b = b, .kv_head = head - b * call.kv_heads, .row0 = row0,
       .rows = left < D::kShape.rows() ? left : D::kShape.rows(), .largest = {}, .total = {}, .out = {}};
#pragma unroll
  for (int i = 0; i < kTiles; i++) of.largest[i] = minus_infinity();
  of.run(call.first + split * call.split, call.first + (split + 1) * call.split);
  of.finish(split);
  check_fault<Mods>(call);
}

LOWBIT_INLINE void clear_fault(const DecodeCall& call) {
  if (threadIdx.x == 0) *call.fault = 0;
}

}  // namespace lowbit::cuda
