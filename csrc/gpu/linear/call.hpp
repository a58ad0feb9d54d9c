// SPDX-License-Identifier: Apache-2.0
// Arguments of the linear kernels: the same text for host and device.
//
// The packed layout of the CPU is read in place: a warp multiplies a tile of 16 columns x 64 k by 8 rows of activations
// at a time. Lane (g, t) = (lane / 4, lane % 4) holds columns 2g and 2g + 1, 8 bytes of a row of the tile, and of chunk
// q of the tile the four k from 16 q + 4 t on, which are one word in the codes of a column. A separate kernel reorders
// activations to match: two words, of row g of 8, per lane, chunk and part (for codes, per lane and pair of chunks).
#pragma once

#include "formats/layout.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit::gpu {

constexpr int kLinearThreads = 256, kLinearWarps = kLinearThreads / 32;
constexpr int kRowsAtOnce = 8, kChunks = 4;  // rows of one tensor core product; chunks of 16 k per tile
constexpr int kMaxParts = 3;                // parts of bfloat16 in a float32
constexpr int64_t kMaxCodesK = 1 << 17;     // max depth of an int32 accumulator of products of codes, 128 * 127 at most

// The sum of a row's codes over a range of k with one scale: all k, a tile, or a part of a tile. The result is w_scale
// * (scale * (dot + start) + zero - w_zero * sum), as in cpu/linear/activations.hpp.
struct alignas(16) RowSum {
  float scale, zero, sum;
  int32_t start;
};

struct LinearCall {
  WeightSpec spec;
  Sections sections;
  const uint8_t* weight;
  const void* x;
  int64_t m;
  int32_t tiles, groups, group_shift;  // parts of tiles with one scale each; 2^group_shift parts share one
  DType dtype, bias_dtype;
  XFormat x_format;
  Activation activation;
  const void *bias, *mul, *add;
  void* y;
  // activations in product order, and sums and scales of their rows
  void* ordered;
  RowSum* sums;       // [m][sums per row]: for codes
  float* row_scale;   // [m]: for floats; negative: the row contains inf or nan, and parts would turn inf into nan
  float* row_offset;  // [m]: for asymmetric codes, the factor of column_sum
  int32_t ctas_of_row = 1;  // CTAs that reorder a row
  int32_t log2_of_rows = 0;  // rows per CTA of a product, with activations as matrices
};

// Product kernels are compiled for two groups of integers per tile, and four of fp4_e2m1.
inline constexpr char kNoSmallGroups[] = "groups of less than 32 of an integer format";
constexpr bool lacks_groups(const WeightSpec& spec) {
  return is_integer(spec.format) && spec.group_size && spec.group_size < 32;
}

// Number of scales along the k of a tile; 0: one for all k, and no zero points.
constexpr int tile_groups(const WeightSpec& spec) {
  if (!spec.group_size) return spec.asymmetric ? 1 : 0;
  return spec.group_size < kTileK ? static_cast<int>(kTileK / spec.group_size) : 1;
}

}  // namespace lowbit::gpu
