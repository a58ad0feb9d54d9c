// SPDX-License-Identifier: Apache-2.0
// linear: a CTA makes 16 columns of up to 64 rows. Its warps take the tiles along k in turn, and their sums are added
// at the end, in order: the same bits every time. A warp has the codes of kAhead tiles on their way, 64 bytes a lane of
// int4 and int8, 32 KB a multiprocessor of two CTAs, enough to keep memory busy.
#pragma once

#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

// A sum of products of codes, scaled with the numbers of its row (RowSum).
template <Format kFormat, bool kAsymmetric>
LOWBIT_INLINE float scaled_sum(int32_t dot, const RowSum& of_row, float zero) {
  const auto whole = static_cast<int32_t>(static_cast<uint32_t>(dot) + static_cast<uint32_t>(of_row.start));
  const float scaled = __fmaf_rn(static_cast<float>(whole), of_row.scale, of_row.zero);
  return kAsymmetric ? __fmaf_rn(zero - static_cast<float>(kCodeOffset<kFormat>), -of_row.sum, scaled) : scaled;
}

// kXParts: of float activations; 0: they are codes. kTileGroups: scales along the k of a tile; 0: one for all k, of a
// weight without zero points. kBlocks: of kRowsAtOnce rows.
template <Format kFormat, int kXParts, int kTileGroups, bool kAsymmetric, int kBlocks>
struct Product {
  static_assert(kTileGroups > 0 || !kAsymmetric);
  static constexpr bool kCodes = kXParts == 0;
  using Sum = std::conditional_t<kCodes, int32_t, float>;
  using Result = std::conditional_t<kTileGroups == 0, Sum, float>;
  static constexpr int kRows = kBlocks * kRowsAtOnce, kSteps = kCodes ? kChunks / 2 : kChunks,
                       kGroupSteps = kTileGroups ? kSteps / kTileGroups : kSteps,
                       kScales = kTileGroups ? kTileGroups : 1, kPieces = kCodes ? 1 : kXParts,
                       kBits = codec_of<kFormat>::bits;
  // As many tiles ahead as 128 registers have room for: a tile takes its codes, scales and zero points.
  static constexpr int kTileWords = kBits + (kTileGroups ? kScales * (1 + kAsymmetric) : 0),
                       kWords = kBlocks == 1 ? 20 : kBlocks == 2 && kWeightParts<kFormat> == 1 && !kCodes ? 12 : 1,
                       kRoom = kWords / kTileWords,
                       kAhead = kRoom < 1 ? 1 : kRoom > 4 ? 4 : kRoom;

  using Ahead = TileAhead<kFormat, kTileGroups, kAsymmetric>;

  const LinearCall& call;
  const uint8_t* panel;
  const uint2* rows;  // activations of this lane and the first block
  int first_row, begin, end;  // begin, end: tiles
  int g, t;
  LevelParts* levels;
  Sum sum[kBlocks][4], total[kBlocks][4];  // total: of activations alone, that of an asymmetric weight's zero point
  Result result[kBlocks][4];

  LOWBIT_INLINE void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) sum[b][i] = total[b][i] = 0;
  }

  LOWBIT_INLINE void ordered(int tile, int block, int piece, uint32_t (&b)[2]) const {
    const uint2* word = rows + ((block * call.tiles + tile) * kSteps * kPieces + piece) * 32;
    const bool is_there = first_row + block * kRowsAtOnce + g < call.m;
    b[0] = is_there ? word->x : 0, b[1] = is_there ? word->y : 0;
  }

  LOWBIT_INLINE void multiply(int tile, const Ahead& ahead, int step) {
    constexpr int kParts = kCodes ? 1 : kWeightParts<kFormat>;
    uint32_t a[kParts][4];
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[0][i] = ahead.tile.words.bytes(2 * step + i / 2, i % 2, t);
    } else {
      ahead.tile.fragments(step, t, levels, a);
    }
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        uint32_t b[2];
        ordered(tile, block, step * kPieces + i, b);
        if constexpr (kCodes) {
          multiply_u8s8(sum[block], a[0], b);
        } else {
#pragma unroll
          for (int j = 0; j < kParts; j++)  // the rest is below 2^-24 of a product
            if (i + j < kMostParts) multiply_bf16(sum[block], a[j], b);
          if constexpr (kAsymmetric) multiply_bf16(total[block], {kBf16One, kBf16One, kBf16One, kBf16One}, b);
        }
      }
  }

  // Adds the sums under one scale to the result: c[0], c[1] are of column 2g and rows 2t, 2t + 1.
  LOWBIT_INLINE void scale_sums(int tile, int part, uint32_t scales, uint32_t zeros) {
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int64_t row = first_row + block * kRowsAtOnce + 2 * t + i % 2;
        const float w_scale = half_of(scales, i / 2);
        if constexpr (kCodes) {
          if (row < call.m)
            result[block][i] =
                __fmaf_rn(scaled_sum<kFormat, kAsymmetric>(
                              sum[block][i], call.sums[(row * call.tiles + tile) * kScales + part],
                              kAsymmetric ? half_of(zeros, i / 2) : 0.0f),
                          w_scale, result[block][i]);
        } else {
          float whole = sum[block][i];
          if constexpr (kAsymmetric)
            whole = __fmaf_rn(static_cast<float>(symmetric_zero(kFormat)) - half_of(zeros, i / 2), total[block][i],
                              whole);
          result[block][i] = __fmaf_rn(whole, w_scale, result[block][i]);
        }
      }
    clear();
  }
  LOWBIT_INLINE static float half_of(uint32_t pair, int column) {
    return float_of_half(pair >> 16 * column);
  }
  LOWBIT_INLINE void use(int tile, const Ahead& ahead) {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      multiply(tile, ahead, step);
      if (kTileGroups && (step + 1) % kGroupSteps == 0)
        scale_sums(tile, step / kGroupSteps, ahead.scale[step / kGroupSteps], ahead.zero[step / kGroupSteps]);
    }
  }

  LOWBIT_INLINE void run(int warp) {
    Ahead ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (begin + warp + i * kLinearWarps < end) ahead[i].load(call, panel, begin + warp + i * kLinearWarps, g, t);
    for (int first = begin + warp; first < end; first += kAhead * kLinearWarps)
#pragma unroll
      for (int i = 0; i < kAhead; i++) {
        const int tile = first + i * kLinearWarps, next = tile + kAhead * kLinearWarps;
        if (tile >= end) break;
        const Ahead now = ahead[i];
        if (next < end) ahead[i].load(call, panel, next, g, t);
        use(tile, now);
      }
  }
};

// The last steps on the sum over all k.
template <Format kFormat, bool kCodes, int kTileGroups, class Whole>
LOWBIT_INLINE void store_whole(const LinearCall& call, int64_t row, int64_t n, Whole whole) {
  PendingScales pending{true, 1.0f};
  float sum;
  if constexpr (kCodes) {
    sum = kTileGroups ? whole : scaled_sum<kFormat, false>(whole, call.sums[row], 0.0f);
  } else {
    sum = whole, pending.row_scale = call.row_scale[row];
    if (kWeightParts<kFormat> > 1 && pending.row_scale < 0.0f)
      sum = sum_alone<kFormat>(call, row, n), pending = {false, 1.0f};
  }
  finish<kFormat>(call, row, n, sum, pending);
}

template <Format kFormat, int kXParts, int kTileGroups, bool kAsymmetric, int kBlocks>
LOWBIT_INLINE void linear(const ProductCall& given) {
  using P = Product<kFormat, kXParts, kTileGroups, kAsymmetric, kBlocks>;
  LOWBIT_SHARED(LevelParts, levels, [16]);
  LOWBIT_SHARED(typename P::Result, results, [kLinearWarps][P::kRows][kPanelColumns]);
  const LinearCall& call = given.call;
  const auto blocks = static_cast<int>(ceil_div(call.m, P::kRows)), cta = static_cast<int>(blockIdx.x) / given.splits;
  const int panel = cta / blocks, first_row = cta % blocks * P::kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int split = static_cast<int>(blockIdx.x) % given.splits, of_split = ceil_div(call.tiles, given.splits);
  if constexpr (is_table(kFormat)) {
    write_levels<kFormat>(levels);
    __syncthreads();
  }
  P product{.call = call, .panel = call.weight + panel * call.sections.row_bytes,
            .rows = static_cast<const uint2*>(call.ordered) + lane +
                    static_cast<int64_t>(first_row / kRowsAtOnce) * call.tiles * (P::kSteps * P::kPieces * 32),
            .first_row = first_row, .begin = split * of_split,
            .end = static_cast<int>(smaller((split + 1) * of_split, call.tiles)), .g = lane / 4, .t = lane % 4,
            .levels = levels};
  product.clear();
  for (auto& block : product.result)
    for (auto& result : block) result = 0;
  product.run(warp);
#pragma unroll
  for (int block = 0; block < kBlocks; block++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      results[warp][block * kRowsAtOnce + 2 * product.t + i % 2][2 * product.g + i / 2] =
          kTileGroups ? product.result[block][i] : static_cast<typename P::Result>(product.sum[block][i]);
  __syncthreads();
  for (int at = static_cast<int>(threadIdx.x); at < P::kRows * kPanelColumns; at += kLinearThreads) {
    const int64_t row = first_row + at / kPanelColumns, column = at % kPanelColumns;
    const int64_t n = static_cast<int64_t>(panel) * kPanelColumns + column;
    if (row >= call.m || n >= call.spec.n) continue;
    typename P::Result whole = 0;  // of int32 with wrap-around, which start undoes
    for (const auto& of_warp : results) whole += of_warp[at / kPanelColumns][column];
    if (given.splits == 1) store_whole<kFormat, P::kCodes, kTileGroups>(call, row, n, whole);
    else static_cast<typename P::Result*>(given.partial)[(split * call.m + row) * call.spec.n + n] = whole;
  }
}

// A thread for each result.
template <Format kFormat, bool kCodes, int kTileGroups>
LOWBIT_INLINE void add_splits(const ProductCall& given) {
  using Result = std::conditional_t<kCodes && kTileGroups == 0, int32_t, float>;
  const LinearCall& call = given.call;
  const int64_t all = call.m * call.spec.n, at = static_cast<int64_t>(blockIdx.x) * kLinearThreads + threadIdx.x;
  if (at >= all) return;
  Result whole = 0;
  const auto* partial = static_cast<const Result*>(given.partial) + at;
  for (int split = 0; split < given.splits; split++) whole += partial[split * all];
  store_whole<kFormat, kCodes, kTileGroups>(call, at / call.spec.n, at % call.spec.n, whole);
}

}  // namespace lowbit::cuda
