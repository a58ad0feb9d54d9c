// SPDX-License-Identifier: Apache-2.0
// Arguments of the linear kernels besides LinearCall: the same text for host and device.
#pragma once

#include "cuda/device/limits.hpp"
#include "gpu/linear/call.hpp"

namespace lowbit::cuda {

using namespace gpu;

// The product for few rows: if a weight has too few columns to occupy the machine, k is split among CTAs (split-k), and
// a second kernel adds their sums in order.
struct ProductCall {
  LinearCall call;
  int32_t splits;  // number of splits of k
  void* partial;   // [splits, m, n], float or int32 like the accumulators; unused with one split
};

// Shared memory of a product's CTA (product.cuh).
constexpr int kRowBytes = 160;  // stride of rows of 64 bfloat16 in shared memory: lanes read different banks
// With activations read in place, which are bfloat16, levels of a lookup format have two parts: 16 bits.
constexpr int parts_of_product(int parts, bool in_place) { return in_place && parts > 2 ? 2 : parts; }
struct ProductShape {
  int bits, parts, x_parts, tile_groups;  // parts: of bfloat16 in a weight
  bool asymmetric;
  int rows;  // 1, or whole blocks of kRowsAtOnce
  bool in_place;

  // Panels of 16 columns per CTA, for which activations are read once: as many as 128 registers have accumulators for.
  constexpr int panels() const {
    return bits <= 8 && parts == 1 && blocks() * (x_parts ? 1 + asymmetric : 1) <= 4 ? 2 : 1;
  }
  constexpr int scales() const { return tile_groups ? tile_groups : 1; }
  constexpr int rows_of_sums() const { return x_parts == 0 && tile_groups ? blocks() * kRowsAtOnce : 1; }
  constexpr int blocks() const { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }
  constexpr int x_bytes() const { return in_place ? rows * kRowBytes : blocks() * (x_parts ? 1024 * x_parts : 512); }
  // Bytes per warp, in whole lines: on an H200 one row of int8 took 10 % less than at multiples
  // of 16 (device/tiles.cuh).
  constexpr int stage_bytes() const {
    const int bytes =
        panels() * (128 * bits + scales() * (1 + asymmetric) * 32) + rows_of_sums() * scales() * 16 + x_bytes();
    return static_cast<int>(round_up(bytes, 128));
  }
  // Tiles per warp in shared memory: two CTAs of 76 KB fit on a multiprocessor of 164 KB or more.
  constexpr int stages() const {
    const int room = (76 << 10) / (kLinearWarps * stage_bytes());
    return room < 1 ? 1 : room > 6 ? 6 : room;
  }
  constexpr int bytes() const {
    const int ring = kLinearWarps * stages() * stage_bytes(),
              results = kLinearWarps * blocks() * kRowsAtOnce * panels() * 16 * 4;
    return (ring > results ? ring : results) + 16 * 8;  // and the levels of a lookup format
  }
};

// Tile sizes of warpgroup products (wgmma.cuh): a CTA computes 16 columns per warp.
struct WgmmaShape {
  int bits;
  bool codes;  // activations are int8
  int tile_groups;
  bool asymmetric;
  int rows;

  constexpr int warps() const { return rows > 128 ? 8 : 16; }  // accumulators of 256 rows take 128 registers
  constexpr int columns() const { return warps() * 16; }
  constexpr int pitch() const { return columns() + 4; }  // row stride of results: warps store to different banks
  constexpr int stage_bytes() const {
    return rows * (codes ? 64 : 128) + warps() * (128 * bits + (tile_groups ? tile_groups : 1) * (1 + asymmetric) * 32);
  }
  constexpr int stages() const {
    const int room = (kMaxSharedOnHopper - 64) / (stage_bytes() + 16);
    return room > 6 ? 6 : room;
  }
  constexpr int bytes() const {
    const int ring = stages() * stage_bytes(), results = rows * pitch() * 4;
    return (ring > results ? ring : results) + stages() * 16 + 64;  // and barriers, and the levels of a lookup format
  }
};
template <int kRows>
constexpr int kThreadsOf =
    WgmmaShape{.bits = 0, .codes = false, .tile_groups = 0, .asymmetric = false, .rows = kRows}.warps() * 32;
struct WgmmaCall {
  static constexpr int kCtas = 1;
  ProductCall product;
};

// Tile sizes for int8 activations (code_tiles.cuh).
constexpr int kTileThreads = 128, kWarpPanels = 2, kTilePanels = kTileThreads / 32 * kWarpPanels,
              kTileColumns = kTilePanels * 16;

// A part of a call with many rows: some decoded columns of the weight times some rows of x.
constexpr int kFinishedByCta = 4 * kLinearThreads;  // results
struct DecodedCall {
  LinearCall call;
  int log2_of_group;  // group size along k; 31: one group
  int64_t first_column, columns, first_row, rows;
  int64_t padded_k;  // multiple of 16 for codes, as the tensor cores require; codes past k are 0
  void* decoded;     // [columns, padded_k], dtype of x, or int8
  int8_t* codes;     // codes of int8 activations: [m, padded_k]; scales and offsets are row_scale, row_offset of call
  void* products;    // [rows, columns], float or int32
  bool is_whole;     // decoded weights include the scales of their columns, and products are the results
};

}  // namespace lowbit::cuda
