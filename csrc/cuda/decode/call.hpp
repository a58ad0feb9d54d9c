// SPDX-License-Identifier: Apache-2.0
// Arguments of the decode kernels, the same text for host and device, and tile sizes.
#pragma once

#include "cuda/attention/call.hpp"
#include "ops/kv_format.hpp"

namespace lowbit::cuda {

constexpr int kDecodeThreads = 128, kDecodeWarps = kDecodeThreads / 32;
constexpr int kSmallDecodeThreads = 2 * kDecodeThreads;  // with this bound each has 128 registers: four CTAs fit
constexpr int kKeyTile = 32;  // max tokens per warp and tile
constexpr int64_t kMinSplit = kDecodeWarps * kKeyTile, kMaxSplits = 32;

// Specialisation of a decode kernel. cache: int8, uint8 (int4 codes) or a 16-bit float; groups: of 32 columns of keys
// and of values; parts: of a query, in the 16-bit float type of the product; tiles: of 8 rows of a CTA.
struct DecodeShape {
  DType cache;
  int groups, v_groups, parts, tiles;

  constexpr bool codes() const { return cache == DType::int8 || cache == DType::uint8; }
  constexpr int group_bytes() const { return cache == DType::uint8 ? 16 : cache == DType::int8 ? 32 : 64; }
  // Bytes per row in shared memory. Keys have an odd number of groups, so that eight rows fall into different banks.
  // Values begin at multiples of 32 bytes, though two rows share banks: a sector of memory split over two copies is
  // requested from L2 twice (device/tiles.cuh). On an H200 a step over int8 took 8 % less, over int4 10 %.
  constexpr int row_bytes() const { return (groups | 1) * group_bytes(); }
  constexpr int v_row_bytes() const { return v_groups * group_bytes() + 32; }
  constexpr int tokens() const { return row_bytes() + v_row_bytes() > 576 ? kKeyTile / 2 : kKeyTile; }  // per warp
  constexpr bool is_small() const { return tiles == 1 && groups <= 4 && v_groups <= 4; }
  constexpr int rows() const { return 8 * tiles; }
  constexpr int scales() const { return !codes() ? 0 : cache == DType::uint8 ? groups : 1; }  // scales per key
  constexpr int v_scales() const { return !codes() ? 0 : cache == DType::uint8 ? v_groups : 1; }
  static constexpr int at_least_one(int count) { return count ? count : 1; }
  constexpr int scale_stride() const { return tokens() + 8; }  // floats between the scales of a warp's tokens
  constexpr int warp_bytes() const {
    return tokens() * (row_bytes() + v_row_bytes()) +
           4 * scale_stride() * (at_least_one(scales()) + at_least_one(v_scales()));
  }
  constexpr int sum_units() const { return v_groups * 2 * tiles; }  // units of 16 columns and 8 rows
  constexpr int query_bytes() const { return (tiles == 1 ? 1 : tiles / 2 * parts) * groups * 2 * 32 * 16; }
  constexpr int bytes() const {  // shared memory
    const int tiles_bytes = kDecodeWarps * warp_bytes(), sum_bytes = kDecodeWarps * sum_units() * 32 * 16;
    return query_bytes() + (tiles_bytes > sum_bytes ? tiles_bytes : sum_bytes) + 4 * rows() * (2 * kDecodeWarps + 2);
  }
};

// A range of keys.
struct KeyRange {
  int64_t first, end;
};

// Keys or values, dense in the last dimension; strides in elements.
struct CacheRows {
  const void* data = nullptr;
  int64_t batch = 0, head = 0, row = 0;
  int pieces = 0;  // 16-byte pieces per row
  const void* scale = nullptr;
  int64_t scale_batch = 0, scale_head = 0, scale_row = 0;
  DType scale_dtype = DType::other;
};

struct DecodeCall {
  HeadRows q{}, out{};
  DType q_dtype = DType::other, out_dtype = DType::other;
  CacheRows k{}, v{};
  int32_t heads = 0, kv_heads = 0, group = 0, length = 0, columns = 0, v_columns = 0;
  int32_t row_blocks = 0, splits = 0;     // blocks of rows of a kv head; splits of the keys
  int64_t first = 0, split = 0, end = 0;  // first key of the first split, keys per split, end of the keys
  float scale = 0;
  bool causal = false, rotated = false;
  int64_t position = 0, window = 0;
  const void* bias = nullptr;  // the mask of the call
  int64_t bias_stride[4] = {};
  DType bias_dtype = DType::other;
  const float* sink = nullptr;
  float* lse = nullptr;
  CapturedCall score{}, mask{};
  int32_t* fault = nullptr;  // set by the mods (score/print.hpp)
  float *largest = nullptr, *total = nullptr, *partial = nullptr;  // [row][split], partial [..][v_groups * 32]

  // The keys before `before` that some of these queries of a head see, from the start of their first tile on.
  LOWBIT_INLINE KeyRange seen(int64_t before, int64_t first_query, int64_t last_query) const {
    const int64_t stop = causal ? larger(0, smaller(before, position + last_query + 1)) : before,
                  start = window > 0 ? larger(0, position + first_query - window + 1) : 0;
    return {smaller(stop, start / kKeyTile * kKeyTile), stop};
  }
  // The keys that all of these queries see.
  LOWBIT_INLINE KeyRange seen_by_all(int64_t before, int64_t first_query, int64_t last_query) const {
    return {window > 0 ? larger(0, position + last_query - window + 1) : 0,
            causal ? smaller(before, position + first_query + 1) : before};
  }
};

// Rows of floats and their codes.
struct KvConvertCall {
  HeadRows x, codes, scale;
  DType x_dtype, scale_dtype;
  int64_t first = 0, rows = 0, heads, length;  // range of rows, counted over all heads
  int32_t columns;
  bool rotated;
};

}  // namespace lowbit::cuda
