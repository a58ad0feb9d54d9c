// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels of linear besides a LinearCall, the same text for host and device.
#pragma once

#include "gpu/linear/call.hpp"

namespace lowbit::cuda {

using namespace gpu;

// The product of few rows: where a weight has too few columns to keep the machine busy, k is split among CTAs, whose
// sums a second kernel adds in their order.
struct ProductCall {
  LinearCall call;
  int32_t splits;  // of k
  void* partial;   // [splits, m, n], float or int32, as sums are; of one split: not used
};

// Sizes of tiles of int8 activations (code_tiles.cuh).
constexpr int kTileThreads = 128, kWarpPanels = 2, kTilePanels = kTileThreads / 32 * kWarpPanels,
              kTileColumns = kTilePanels * 16;

// A part of a call of many rows: some columns of the weight, decoded, times some rows of x.
constexpr int kFinishedByCta = 4 * kLinearThreads;  // results
struct DecodedCall {
  LinearCall call;
  int log2_of_group;  // of k; 31: one group
  int64_t first_column, columns, first_row, rows;
  int64_t padded_k;  // of codes a multiple of 16, as the tensor cores want it; codes behind k are 0
  void* decoded;     // [columns, padded_k], of the dtype of x, or int8
  int8_t* codes;     // of int8 activations: [m, padded_k]; their scales and offsets are row_scale, row_offset of call
  void* products;    // [rows, columns], float or int32
};

}  // namespace lowbit::cuda
