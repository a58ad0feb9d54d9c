// SPDX-License-Identifier: Apache-2.0
// linear: a CTA computes the columns of kPanels panels for up to 32 rows. Its warps take tiles along k in turn, and
// their accumulators are added at the end, in order: the same bits every time. A warp has a ring of stages in shared
// memory, each with the data of a tile: codes, scales, zero points and activations. They are copied kStages - 1 tiles
// ahead, activations through L1, where the other CTA of the multiprocessor finds them. (Loading to registers ahead did
// not help: NVRTC assigns all loads one scoreboard, so that the first use waited for all. A row of int4 at 8192 x 8192
// then took 25 us on an H200.)
#pragma once

#include "cuda/device/early.cuh"
#include "cuda/device/tiles.cuh"
#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "cuda/linear/sums.cuh"

namespace lowbit::cuda {

// kXParts: parts of float activations; 0: they are codes. kTileGroups: scales along the k of a tile; 0: one for all k,
// and no zero points. kRows: 1, or whole blocks of kRowsAtOnce. kInPlace: activations are read as given.
template <Format kFormat, int kXParts, int kTileGroups, bool kAsymmetric, int kRows, bool kInPlace>
struct Product {
  static_assert(kTileGroups > 0 || !kAsymmetric);
  static_assert(!kInPlace || kXParts == 1);
  static constexpr ProductShape kShape{.bits = codec_of<kFormat>::bits,
                                       .parts = parts_of_product(kWeightParts<kFormat>, kInPlace),
                                       .x_parts = kXParts, .tile_groups = kTileGroups, .asymmetric = kAsymmetric,
                                       .rows = kRows, .in_place = kInPlace};
  static constexpr bool kCodes = kXParts == 0, kSumsOfRows = kCodes && kTileGroups > 0;
  // Unit of integers in bfloat16 (mma.cuh).
  static constexpr float kUnit = !kCodes && is_integer(kFormat) ? kUnitOfIntegers : 1.0f;
  using Sum = std::conditional_t<kCodes, int32_t, float>;
  using Result = std::conditional_t<kTileGroups == 0, Sum, float>;
  static constexpr int kPanels = kShape.panels(), kStages = kShape.stages(), kBlocks = kShape.blocks(),
                       kSteps = kCodes ? kChunks / 2 : kChunks, kGroupSteps = kTileGroups ? kSteps / kTileGroups : kSteps,
                       kScales = kTileGroups ? kTileGroups : 1, kPieces = kCodes ? 1 : kXParts,
                       kTileBytes = 128 * kShape.bits, kPairs = kAsymmetric ? 2 : 1, kRowOfTile = 2 * kTileK,
                       kBlockBytes = kSteps * kPieces * 256;  // bytes of reordered activations

  struct Stage {
    alignas(128) uint8_t codes[kPanels][kTileBytes];
    uint16_t scales[kPanels][kScales][kPairs][kPanelColumns];  // and zero points
    RowSum sums[kShape.rows_of_sums()][kScales];
    uint2 x[kShape.x_bytes() / 8];
  };
  static_assert(sizeof(Stage) == kShape.stage_bytes());
  using Ring = Stage[kLinearWarps][kStages];
  using Results = Result[kLinearWarps][kBlocks * kRowsAtOnce][kPanels * kPanelColumns];
  struct Shared {
    union {
      Ring rings;
      Results results;
    };
    LevelParts levels[16];  // levels of a lookup format
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const LinearCall& call;
  Shared& shared;
  int first_panel, first_row, lane, g, t;
  Sum sum[kPanels][kBlocks][4], total[kBlocks][4];  // total: sums of activations, for zero points
  Result result[kPanels][kBlocks][4];               // [i]: column 2g + i / 2 and row 2t + i % 2

  LOWBIT_INLINE void clear() {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        total[b][i] = 0;
#pragma unroll
        for (int p = 0; p < kPanels; p++) sum[p][b][i] = 0;
      }
  }

  // Before waiting for other kernels: prefetches the codes of the tiles that all warps load first. begin, end:
  // over all warps.
  LOWBIT_INLINE void prefetch(int begin, int end) const {
    const int tiles = static_cast<int>(smaller(end - begin, kLinearWarps * (kStages - 1)));
    if (threadIdx.x < kPanels && tiles > 0)
      prefetch_to_l2(panel(static_cast<int>(threadIdx.x)) + call.sections.codes + begin * kTileBytes,
                     tiles * kTileBytes);
  }

  LOWBIT_INLINE const uint8_t* panel(int p) const {  // repeats the last one past the end
    return call.weight + smaller(first_panel + p, static_cast<int>(call.spec.panels()) - 1) * call.sections.row_bytes;
  }

  // Addresses of this lane's 16-byte pieces of the next tile in global memory.
  struct Source {
    int tile;
    const uint8_t *codes[kPanels], *scales;  // scales: of group 0
    const uint8_t *x, *sums;
    int64_t x_step;  // bytes to the rows of the next piece: 4 rows if in place, else 8, a block
  };

  LOWBIT_INLINE Source source_of(int tile) const {
    Source from{};
    from.tile = tile;
#pragma unroll
    for (int p = 0; p < kPanels; p++) from.codes[p] = panel(p) + call.sections.codes + tile * kTileBytes + lane * 16;
    if constexpr (kTileGroups > 0)
      from.scales = panel(lane / kScalePieces) + lane % 2 * 16 +
                    (is_zero() ? call.sections.zero : call.sections.group_scale);
    if constexpr (kInPlace) {
      from.x_step = 4 * 2 * call.spec.k;
      from.x = static_cast<const uint8_t*>(call.x) + (first_row + lane / 8) * 2 * call.spec.k + tile * kRowOfTile +
               lane % 8 * 16;
    } else {
      from.x_step = static_cast<int64_t>(call.tiles) * kBlockBytes;
      from.x = static_cast<const uint8_t*>(call.ordered) + first_row / kRowsAtOnce * from.x_step + tile * kBlockBytes +
               lane * 16;
    }
    if constexpr (kSumsOfRows)
      from.sums = reinterpret_cast<const uint8_t*>(
          call.sums + (static_cast<int64_t>(first_row + lane / kScales) * call.tiles + tile) * kScales +
          lane % kScales);
    return from;
  }

  static constexpr int kScalePieces = kScales * kPairs * 2;  // pieces per panel and tile
  static_assert(kPanels * kScalePieces <= 32);
  LOWBIT_INLINE bool is_zero() const { return kAsymmetric && lane / 2 % 2; }

  LOWBIT_INLINE static void copy_16(void* to, const void* from, bool is_there = true) {
    copy_async(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(from), is_there);
  }

  // Copies a tile, and advances to the next one of this warp.
  LOWBIT_INLINE void copy(Stage& stage, Source& from) const {
#pragma unroll
    for (int p = 0; p < kPanels; p++) {
#pragma unroll
      for (int at = 0; at < kTileBytes; at += 32 * 16)
        if (at + 32 * 16 <= kTileBytes || at + lane * 16 < kTileBytes)
          copy_16(stage.codes[p] + at + lane * 16, from.codes[p] + at);
      from.codes[p] += kLinearWarps * kTileBytes;
    }
    if constexpr (kTileGroups > 0) {
      const int of_tile = from.tile * kScales + lane / (2 * kPairs) % kScales >> call.group_shift, last = call.groups - 1;
      if (lane < kPanels * kScalePieces && (is_zero() || call.spec.group_size))
        copy_16(stage.scales[0][0][0] + lane * 8, from.scales + (of_tile < last ? of_tile : last) * 32);
    }
    const int rows = static_cast<int>(call.m) - first_row;
    copy_activations(stage, from, rows);
    if constexpr (kSumsOfRows) {
      const int64_t step = static_cast<int64_t>(32 / kScales) * call.tiles * kScales * sizeof(RowSum);
#pragma unroll
      for (int i = 0; i < kRows * kScales; i += 32)
        if (i + lane < kRows * kScales && (i + lane) / kScales < rows)
          copy_16(stage.sums[0] + i + lane, from.sums + i / 32 * step);
      from.sums += kLinearWarps * kScales * sizeof(RowSum);
    }
    from.tile += kLinearWarps;
  }

  LOWBIT_INLINE void copy_activations(Stage& stage, Source& from, int rows) const {
    auto* to = reinterpret_cast<uint8_t*>(stage.x);
    if constexpr (kInPlace) {
#pragma unroll
      for (int i = 0; i < (kRows + 3) / 4; i++)
        if (i * 4 + lane / 8 < rows && (kRows > 1 || lane < 8))
          copy_through_l1(to + (i * 4 + lane / 8) * kRowBytes + lane % 8 * 16, from.x + i * from.x_step);
      from.x += kLinearWarps * kRowOfTile;
    } else {
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
        if (block * kRowsAtOnce + lane % 16 / 2 < rows)
#pragma unroll
          for (int at = 0; at < kBlockBytes; at += 32 * 16)
            copy_through_l1(to + block * kBlockBytes + at + lane * 16, from.x + block * from.x_step + at);
      from.x += kLinearWarps * kBlockBytes;
    }
  }

  LOWBIT_INLINE uint2 activations(const Stage& stage, int block, int step, int piece) const {
    if constexpr (!kInPlace) return stage.x[((block * kSteps + step) * kPieces + piece) * 32 + lane];
    const int row = kRows == 1 ? 0 : block * kRowsAtOnce + g;
    const uint2 x = *reinterpret_cast<const uint2*>(reinterpret_cast<const uint8_t*>(stage.x) + row * kRowBytes +
                                                    step * 32 + t * 8);
    if constexpr (is_float(kFormat)) return x;
    return {__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632)};  // in pairs of k 0, 2 and 1, 3
  }

  static constexpr uint32_t kBf16Unit = 0x3f803f80u - (kUnit == 1.0f ? 0 : 6 * 0x800080u);  // 1 / kUnit, twice
  static constexpr int kParts = kCodes ? 1 : kShape.parts;

  LOWBIT_INLINE void multiply(const Stage& stage, const LaneTile<kFormat> (&tiles)[kPanels], int step) {
    uint32_t a[kPanels][kParts][4];
#pragma unroll
    for (int p = 0; p < kPanels; p++)
      if constexpr (kCodes) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[p][0][i] = tiles[p].words.bytes(2 * step + i / 2, i % 2, t);
      } else {
        tiles[p].fragments(step, t, shared.levels, a[p]);
      }
#pragma unroll
    for (int block = 0; block < kBlocks; block++)
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        const uint2 b = activations(stage, block, step, i);
#pragma unroll
        for (int p = 0; p < kPanels; p++) multiply(sum[p][block], a[p], b, i);
        if constexpr (kAsymmetric && !kCodes)
          multiply_bf16(total[block], {kBf16Unit, kBf16Unit, kBf16Unit, kBf16Unit}, {b.x, b.y});
      }
  }

  // Multiplies by piece i of the activations.
  LOWBIT_INLINE static void multiply(Sum (&to)[4], const uint32_t (&a)[kParts][4], const uint2& b, int i) {
    if constexpr (kCodes) {
      multiply_u8s8(to, a[0], {b.x, b.y});
    } else {
#pragma unroll
      for (int j = 0; j < kParts; j++)  // the rest is below 2^-24 of a product
        if (i + j < kMaxParts) multiply_bf16(to, a[j], {b.x, b.y});
    }
  }

  // Float16 numbers for both columns of the lane.
  LOWBIT_INLINE uint32_t pair(const Stage& stage, int p, int part, bool zero) const {
    return *reinterpret_cast<const uint32_t*>(stage.scales[p][part][zero] + 2 * g);
  }

  // Adds the accumulators of one scale to the result.
  LOWBIT_INLINE void scale_sums(const Stage& stage, int part) {
#pragma unroll
    for (int p = 0; p < kPanels; p++) {
      const uint32_t scales = call.spec.group_size ? pair(stage, p, part, false) : 0x3c003c00u,
                     zeros = kAsymmetric ? pair(stage, p, part, true) : 0;
      const float scale[2] = {float_of_half(scales), float_of_half(scales >> 16)};
      const float zero[2] = {kAsymmetric ? float_of_half(zeros) : 0.0f, kAsymmetric ? float_of_half(zeros >> 16) : 0.0f};
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float whole;
          if constexpr (kCodes) {
            whole = scaled_sum<kFormat, kAsymmetric>(
                sum[p][block][i], stage.sums[block * kRowsAtOnce + 2 * t + i % 2][part], zero[i / 2]);
          } else {
            whole = sum[p][block][i];
            if constexpr (kAsymmetric)
              whole = __fmaf_rn(static_cast<float>(symmetric_zero(kFormat)) - zero[i / 2], total[block][i], whole);
          }
          result[p][block][i] = __fmaf_rn(whole, scale[i / 2], result[p][block][i]);
        }
    }
    clear();
  }

  LOWBIT_INLINE void use(const Stage& stage) {
    LaneTile<kFormat> tiles[kPanels];
#pragma unroll
    for (int p = 0; p < kPanels; p++) tiles[p].template load<FromShared>(stage.codes[p], g, t);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      multiply(stage, tiles, step);
      if constexpr (kTileGroups > 0)
        if ((step + 1) % kGroupSteps == 0) scale_sums(stage, step / kGroupSteps);
    }
  }

  // Processes tiles begin, begin + kLinearWarps ... before end.
  LOWBIT_INLINE void run(int warp, int begin, int end) {
    Stage(&ring)[kStages] = shared.rings[warp];
    clear();
#pragma unroll
    for (auto& of_panel : result)
#pragma unroll
      for (auto& block : of_panel)
#pragma unroll
        for (auto& of : block) of = 0;
    Source from = source_of(begin);
#pragma unroll
    for (int i = 0; i < kStages - 1; i++) {
      if (from.tile < end) copy(ring[i], from);
      commit_copies();
    }
    for (int tile = begin, at = 0; tile < end; tile += kLinearWarps) {
      if (from.tile < end) copy(ring[at == 0 ? kStages - 1 : at - 1], from);
      commit_copies();
      wait_for_groups<kStages - 1>();
      __syncwarp();  // this tile has arrived
      use(ring[at]);
      __syncwarp();  // all lanes are done with it
      at = at + 1 == kStages ? 0 : at + 1;
    }
  }

  LOWBIT_INLINE Results& hand_over(int warp) {
    __syncthreads();  // all warps are done with their rings
    auto& results = shared.results;
#pragma unroll
    for (int p = 0; p < kPanels; p++)
#pragma unroll
      for (int block = 0; block < kBlocks; block++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          results[warp][block * kRowsAtOnce + 2 * t + i % 2][p * kPanelColumns + 2 * g + i / 2] =
              kTileGroups ? result[p][block][i] : static_cast<Result>(sum[p][block][i]);
    __syncthreads();
    return results;
  }

  // Result `at` of the CTA's rows x columns.
  LOWBIT_INLINE static Result whole(const Results& results, int at) {
    constexpr int kColumns = kPanels * kPanelColumns;
    Result sum = 0;  // for int32 with wrap-around, which start undoes
    for (const auto& of_warp : results) sum += of_warp[at / kColumns][at % kColumns];
    if constexpr (kUnit != 1.0f) sum *= kUnit;
    return sum;
  }
};

template <Format kFormat, int kXParts, int kTileGroups, bool kAsymmetric, int kRows, bool kInPlace>
LOWBIT_INLINE void linear(const ProductCall& given) {
  using P = Product<kFormat, kXParts, kTileGroups, kAsymmetric, kRows, kInPlace>;
  constexpr int kColumns = P::kPanels * kPanelColumns;
  LOWBIT_DYNAMIC_SHARED(typename P::Shared, shared);
  const LinearCall& call = given.call;
  const auto blocks = static_cast<int>(ceil_div(call.m, kRows)), cta = static_cast<int>(blockIdx.x) / given.splits;
  const int first_panel = cta / blocks * P::kPanels, first_row = cta % blocks * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int split = static_cast<int>(blockIdx.x) % given.splits, of_split = ceil_div(call.tiles, given.splits),
            begin = split * of_split, end = static_cast<int>(smaller(begin + of_split, call.tiles));
  let_next_begin();
  if constexpr (is_table(kFormat)) {
    write_levels<kFormat>(shared.levels);
    __syncthreads();
  }
  P product{.call = call, .shared = shared, .first_panel = first_panel, .first_row = first_row, .lane = lane,
            .g = lane / 4, .t = lane % 4, .sum = {}, .total = {}, .result = {}};
  product.prefetch(begin, end);
  wait_for_kernels_before();
  product.run(warp, begin + warp, end);
  const auto& results = product.hand_over(warp);
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kColumns; at += kLinearThreads) {
    const int64_t row = first_row + at / kColumns, n = first_panel * kPanelColumns + at % kColumns;
    if (row >= call.m || n >= call.spec.n) continue;
    const typename P::Result whole = P::whole(results, at);
    if (given.splits == 1) store_whole<kFormat, P::kCodes, kTileGroups>(call, row, n, whole);
    else static_cast<typename P::Result*>(given.partial)[(split * call.m + row) * call.spec.n + n] = whole;
  }
}

}  // namespace lowbit::cuda
