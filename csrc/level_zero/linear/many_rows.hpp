// SPDX-License-Identifier: Apache-2.0
// linear for many rows with dpas: a work-group computes 16 columns of 128 rows (dg2: 64), 16 (8) rows per
// sub-group. Together they decode 4 tiles of the weight into shared memory, half a tile each, then multiply them by
// their own rows.
#pragma once

#include "level_zero/linear/product.hpp"

namespace lowbit::level_zero {

constexpr int kManyBlocks = 2 / kSides, kManyRows = kWorkers * kManyBlocks * 8;

// The weights decoded by one sub-group: factors of products, 32 bytes per lane.
struct DecodedHalf {
  u32x8 factor[2][gpu::kMaxParts][kSides][kLanes];  // for codes, only the first part
};

template <bool kCodes>
union ManyRowsMemory {
  DecodedHalf halves[kWorkers];
  uint32_t sums[1][kManyRows][kPanelColumns];
};

template <bool kCodes>
LOWBIT_INLINE void decode_half(const uint8_t* tile, int half, int lane, const LevelParts* levels, DecodedHalf& to) {
  Codes codes;
  codes.load(tile, half);
  if constexpr (kCodes) {
#pragma unroll
    for (int side = 0; side < kSides; side++)
      to.factor[0][0][side][lane] = in_activation_order(codes.bytes(side, half));
  } else {
    for (int which = 0; which < 2; which++) {
      for_chunks(codes, tile, half, which, levels, [&](int first, int sides, const Chunk* chunk) LOWBIT_LAMBDA {
#pragma unroll
        for (int part = 0; part < gpu::kMaxParts; part++)
          if (part < weight_parts())
#pragma unroll
            for (int side = 0; side < kSides; side++)
              if (side < sides)
                to.factor[which][part][first + side][lane] = chunk[side].part[part];
      });
    }
  }
}

template <bool kCodes>
LOWBIT_INLINE void linear_of_many(const LinearCall& call) {
  LOWBIT_SHARED(LevelParts, levels, [16]);
  LOWBIT_SHARED(ManyRowsMemory<kCodes>, memory, [1]);
  write_levels<kCodes>(call, levels);
  const auto group = static_cast<uint32_t>(blockIdx.x), blocks = static_cast<uint32_t>(ceil_div(call.m, kManyRows));
  const int64_t panel = group / blocks, first_row = int64_t{group % blocks} * kManyRows;
  const int worker = static_cast<int>(threadIdx.x) / kLanes, lane = static_cast<int>(threadIdx.x) % kLanes;
  Product<kCodes, 8, kManyBlocks> product(call, panel, first_row + worker * (kManyBlocks * 8), lane, levels);
  const bool has_rows = product.first_row < call.m;
  for (int first = 0; first < call.tiles; first += kWorkers / 2) {
    const int own = first + worker / 2;
    if (own < call.tiles) decode_half<kCodes>(product.tile_at(own), worker % 2, lane, levels, memory[0].halves[worker]);
    __syncthreads();
    const int count = call.tiles - first < kWorkers / 2 ? 2 * (call.tiles - first) : kWorkers;
    for (int i = 0; has_rows && i < count; i++) {
      const int tile = first + i / 2, half = i % 2;
      const DecodedHalf& decoded = memory[0].halves[i];
      for (int which = kCodes; which < 2; which++) {
        if constexpr (kCodes)
          product.multiply_codes(tile, half,
                                 [&](int side) LOWBIT_LAMBDA { return decoded.factor[0][0][side][lane]; });
        else
          product.multiply_floats(tile, half, which, 0, kSides,
                                  [&](int side, int part) LOWBIT_LAMBDA {
                                    return decoded.factor[which][part][side][lane];
                                  });
        product.end_chunk(tile, half, which);
      }
    }
    __syncthreads();
  }
  product.write_sums(&memory[0].sums[0][worker * (kManyBlocks * 8)]);
  __syncthreads();
  finish_sums<kCodes>(call, product.panel, panel * kPanelColumns, first_row, memory[0].sums, levels, kGroupThreads);
}

}  // namespace lowbit::level_zero
