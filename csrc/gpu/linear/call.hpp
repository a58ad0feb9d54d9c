// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels of linear, the same text for host and device.
//
// The packed layout of the CPU is read as it lies: a warp multiplies a tile of 16 columns x 64 k by 8 rows of
// activations at a time. Lane (g, t) = (lane / 4, lane % 4) holds columns 2g and 2g + 1, 8 bytes of a row of the tile,
// and of chunk q of the tile the four k from 16 q + 4 t on, which are one word of any codes of a column. Activations
// are put into that order first, by a kernel of their own: two words, of row g of 8, for each lane, chunk and part (of
// codes, for each two chunks).
#pragma once

#include "formats/layout.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit::gpu {

constexpr int kLinearThreads = 256, kLinearWarps = kLinearThreads / 32;
constexpr int kRowsAtOnce = 8, kChunks = 4;  // rows of one product of the tensor cores; 16 k each in a tile
constexpr int kMaxParts = 3;                // of bfloat16 in a float32
constexpr int64_t kMaxCodesK = 1 << 17;     // an int32 holds the sum of so many products of codes, 128 * 127 at most

// One sum of the codes of a row, over the k that products sum before a scale is due: all, or a tile or a part of it.
// Its result is w_scale * (scale * (dot + start) + zero - w_zero * sum), as in cpu/linear/activations.hpp.
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
  int32_t tiles, groups, group_shift;  // tile parts of a scale each, 2^group_shift share one
  DType dtype, bias_dtype;
  XFormat x_format;
  Activation activation;
  const void *bias, *mul, *add;
  void* y;
  // activations in order, and the sums and scales of their rows
  void* ordered;
  RowSum* sums;       // [m][sums of a row]: of codes
  float* row_scale;   // [m]: of floats; negative: the row holds inf or nan, and parts would make nan of its inf
  float* row_offset;  // [m]: of asymmetric codes, the factor of column_sum
  int32_t ctas_of_row = 1;  // that put a row of them in order
  int32_t log2_of_rows = 0;  // of a CTA's product, where activations are matrices
};

// Kernels of products are compiled for two groups of integers in a tile, and four of fp4_e2m1.
inline constexpr char kNoSmallGroups[] = "groups of less than 32 of an integer format";
constexpr bool lacks_groups(const WeightSpec& spec) {
  return is_integer(spec.format) && spec.group_size && spec.group_size < 32;
}

// Scales along the k of a tile; 0: one for all k of a weight without zero points.
constexpr int tile_groups(const WeightSpec& spec) {
  if (!spec.group_size) return spec.asymmetric ? 1 : 0;
  return spec.group_size < kTileK ? static_cast<int>(kTileK / spec.group_size) : 1;
}

}  // namespace lowbit::gpu
