// SPDX-License-Identifier: Apache-2.0
// linear for many rows of int8 activations: a CTA computes 128 columns of up to 64 rows, a warp 32 of these columns.
// Codes of the activations, and sums and scales of their rows, are copied to shared memory one tile of k ahead; each
// warp reads the weight of its own columns, also one tile ahead, as signed bytes. Accumulators are exact in int32
// within the range of one scale, and are scaled in registers.
#pragma once

#include "cuda/device/tiles.cuh"
#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

template <Format kFormat, int kTileGroups, bool kAsymmetric, int kBlocks>
struct CodeTiles {
  static_assert(kTileGroups > 0 || !kAsymmetric);
  static constexpr int kRows = kBlocks * kRowsAtOnce, kSteps = kChunks / 2, kScales = kTileGroups ? kTileGroups : 1,
                       kGroupSteps = kSteps / kScales;
  struct Stage {
    alignas(16) uint2 codes[kBlocks][kSteps][32];
    RowSum sums[kTileGroups ? kRows : 1][kScales];
  };
  union Shared {
    Stage stages[2];
    float results[kRows][kTileColumns + 4];  // warps write to different banks
  };

  const LinearCall& call;
  Shared& shared;
  const uint8_t* panel[kWarpPanels];
  int64_t first_row;
  int g, t;
  int32_t sum[kWarpPanels][kBlocks][4];
  float result[kWarpPanels][kBlocks][4];  // [i]: column 2g + i / 2, row 2t + i % 2

  LOWBIT_INLINE void copy(int tile) {
    Stage& stage = shared.stages[tile % 2];
    constexpr int kPieces = kSteps * 16;  // 16-byte pieces of a block
    const auto* ordered = static_cast<const uint16_t*>(call.ordered);
#pragma unroll
    for (int at = static_cast<int>(threadIdx.x); at < kBlocks * kPieces; at += kTileThreads) {
      const int64_t block = first_row / kRowsAtOnce + at / kPieces;
      const bool is_there = block * kRowsAtOnce < call.m;
      copy_async(reinterpret_cast<uint16_t*>(stage.codes) + at * 8,
                 ordered + ((is_there ? block * call.tiles + tile : 0) * kPieces + at % kPieces) * 8, is_there);
    }
    if constexpr (kTileGroups > 0)
      for (int at = static_cast<int>(threadIdx.x); at < kRows * kScales; at += kTileThreads) {
        const int64_t row = first_row + at / kScales;
        const bool is_there = row < call.m;
        copy_async(reinterpret_cast<uint16_t*>(stage.sums) + at * 8,
                   reinterpret_cast<const uint16_t*>(
                       call.sums + (is_there ? (row * call.tiles + tile) * kScales + at % kScales : 0)),
                   is_there);
      }
  }

  LOWBIT_INLINE void clear() {
#pragma unroll
    for (auto& of_panel : sum)
#pragma unroll
      for (auto& block : of_panel)
#pragma unroll
        for (int32_t& of : block) of = 0;
  }

  using Ahead = TileAhead<kFormat, kTileGroups, kAsymmetric>;
  LOWBIT_INLINE void load(int tile, Ahead (&ahead)[kWarpPanels]) const {
#pragma unroll
    for (int p = 0; p < kWarpPanels; p++) ahead[p].load(call, panel[p], tile, g, t);
  }

  LOWBIT_INLINE void multiply(const Stage& stage, const Ahead (&ahead)[kWarpPanels], int step) {
    uint32_t a[kWarpPanels][4];
#pragma unroll
    for (int p = 0; p < kWarpPanels; p++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[p][i] = signed_bytes<kFormat>(ahead[p].tile.words.bytes(2 * step + i / 2, i % 2, t));
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const uint2 b = stage.codes[block][step][threadIdx.x % 32];
#pragma unroll
      for (int p = 0; p < kWarpPanels; p++) multiply_s8s8(sum[p][block], a[p], {b.x, b.y});
    }
  }

  // Whether the accumulators are complete for a scale: its zero point needs the sum of the activations too.
  LOWBIT_INLINE bool is_due(int tile) const {
    const bool ends_group = ((tile + 1) & ((1 << call.group_shift) - 1)) == 0;
    return kAsymmetric || kTileGroups > 1 || tile + 1 == call.tiles || ends_group;
  }

  LOWBIT_INLINE void scale_sums(const Stage& stage, const Ahead (&ahead)[kWarpPanels], int part) {
#pragma unroll
    for (int block = 0; block < kBlocks; block++) {
      const RowSum* rows[2] = {&stage.sums[block * kRowsAtOnce + 2 * t][part],
                               &stage.sums[block * kRowsAtOnce + 2 * t + 1][part]};
      const float scale[2] = {rows[0]->scale, rows[1]->scale};
      const float total[2] = {kAsymmetric ? rows[0]->sum : 0.0f, kAsymmetric ? rows[1]->sum : 0.0f};
#pragma unroll
      for (int p = 0; p < kWarpPanels; p++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float scaled = static_cast<float>(sum[p][block][i]) * scale[i % 2];
          if constexpr (kAsymmetric) {
            const float zero = float_of_half(ahead[p].zero[part] >> 16 * (i / 2));
            scaled = __fmaf_rn(zero - static_cast<float>(symmetric_zero(kFormat)), -total[i % 2], scaled);
          }
          const float w_scale = float_of_half(ahead[p].scale[part] >> 16 * (i / 2));
          result[p][block][i] = __fmaf_rn(scaled, w_scale, result[p][block][i]);
        }
    }
    clear();
  }

  LOWBIT_INLINE void run() {
    Ahead next[kWarpPanels];
    copy(0), load(0, next);
    for (int tile = 0; tile < call.tiles; tile++) {
      wait_for_copies();
      __syncthreads();  // this tile has arrived, and all threads are done with the one before
      Ahead now[kWarpPanels];
#pragma unroll
      for (int p = 0; p < kWarpPanels; p++) now[p] = next[p];
      if (tile + 1 < call.tiles) copy(tile + 1), load(tile + 1, next);
      const Stage& stage = shared.stages[tile % 2];
#pragma unroll
      for (int step = 0; step < kSteps; step++) {
        multiply(stage, now, step);
        if constexpr (kTileGroups > 0)
          if ((step + 1) % kGroupSteps == 0 && is_due(tile)) scale_sums(stage, now, step / kGroupSteps);
      }
    }
  }

  // Copies results to shared memory, from where they are stored column by column.
  LOWBIT_INLINE void hand_over() {
    __syncthreads();  // all threads are done with the last tile
    const int first_column = static_cast<int>(threadIdx.x) / 32 * kWarpPanels * 16;
#pragma unroll
    for (int p = 0; p < kWarpPanels; p++)
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = block * kRowsAtOnce + 2 * t + i % 2;
          float of = result[p][block][i];
          if constexpr (kTileGroups == 0)
            of = first_row + row < call.m ? static_cast<float>(sum[p][block][i]) * call.sums[first_row + row].scale : 0;
          shared.results[row][first_column + p * 16 + 2 * g + i / 2] = of;
        }
    __syncthreads();
  }
};

template <Format kFormat, int kTileGroups, bool kAsymmetric, int kBlocks>
LOWBIT_INLINE void linear_code_tiles(const LinearCall& call) {
  using Tiles = CodeTiles<kFormat, kTileGroups, kAsymmetric, kBlocks>;
  LOWBIT_SHARED(typename Tiles::Shared, shared, );
  const int64_t blocks = ceil_div(call.m, Tiles::kRows), first_panel = blockIdx.x / blocks * kTilePanels,
                last_panel = ceil_div(call.spec.n, kPanelColumns) - 1;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  Tiles of{.call = call, .shared = shared, .panel = {}, .first_row = blockIdx.x % blocks * Tiles::kRows,
           .g = lane / 4, .t = lane % 4, .sum = {}, .result = {}};
#pragma unroll
  for (int p = 0; p < kWarpPanels; p++)
    of.panel[p] = call.weight + smaller(first_panel + warp * kWarpPanels + p, last_panel) * call.sections.row_bytes;
  of.run();
  of.hand_over();
  for (int at = static_cast<int>(threadIdx.x); at < Tiles::kRows * kTileColumns; at += kTileThreads) {
    const int64_t row = of.first_row + at / kTileColumns, n = first_panel * kPanelColumns + at % kTileColumns;
    if (row < call.m && n < call.spec.n)
      finish<kFormat>(call, row, n, shared.results[at / kTileColumns][at % kTileColumns], {true, 1.0f});
  }
}

}  // namespace lowbit::cuda
