// SPDX-License-Identifier: Apache-2.0
// linear for 17 rows or more on compute capability 9.0, with warpgroup products: the weight is the first factor, in
// registers, where each warp decodes its own panel of 16 columns; activations are the second, in shared memory, shared
// by all warps of a CTA. A ring of stages in shared memory has the data of some tiles: each warp copies its codes
// itself; activations, which are contiguous, are one bulk copy. (Bulk copies of panels too, 48 of 32 bytes to 1 KB per
// tile, doubled the time of 1024 rows on an H100.) Warps wait for stages, not for each other: while one warpgroup
// decodes a tile, the tensor cores run products of the others.
//
// Weights with scales per group are rounded once to 16 bits, like those that cuBLAS multiplies (decoded.cuh).
#pragma once

#include "cuda/device/barrier.cuh"
#include "cuda/device/early.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "cuda/linear/sums.cuh"

namespace lowbit::cuda {

// kCodes: int8 activations with one scale per row, and a weight with one scale per column; else activations have
// kDtype. Codes for other weights are float16, in which they are exact.
template <Format kFormat, bool kCodes, DType kDtype, int kTileGroups, bool kAsymmetric, int kRows>
struct WgmmaProduct {
  static_assert(kTileGroups > 0 || !kAsymmetric);
  static_assert(!kCodes || kTileGroups == 0);
  static constexpr WgmmaShape kShape{bits(kFormat), kCodes, kTileGroups, kAsymmetric, kRows};
  // Decoded by pairs: to bfloat16 in the units of fragments, or to float16. Others weight by weight.
  static constexpr bool kPairs16 = !kCodes && !kAsymmetric && !is_table(kFormat) && kWeightParts<kFormat> == 1,
                        kFragments = kPairs16 && kDtype == DType::bfloat16 && !is_float(kFormat),
                        kHalves = kPairs16 && kDtype == DType::float16 && is_integer(kFormat);
  static constexpr float kUnit = kFragments && is_integer(kFormat) ? kUnitOfIntegers : 1.0f;
  using Sum = std::conditional_t<kCodes, int32_t, float>;
  static constexpr int kWarps = kShape.warps(), kStages = kShape.stages(), kSteps = kCodes ? kChunks / 2 : kChunks,
                       kScales = kTileGroups ? kTileGroups : 1, kPairs = kAsymmetric ? 2 : 1,
                       kTileBytes = 128 * kShape.bits, kBlockBytes = kSteps * 256;  // 8 rows of activations

  struct Stage {
    alignas(16) uint8_t x[kRows / kRowsAtOnce][kBlockBytes];
    uint8_t codes[kWarps][kTileBytes];
    uint16_t scales[kWarps][kScales][kPairs][kPanelColumns];  // and zero points
  };
  static_assert(sizeof(Stage) == kShape.stage_bytes() && kStages >= 3);
  struct Shared {
    union {
      Stage ring[kStages];
      Sum results[kRows][kShape.pitch()];
    };
    Barrier full[kStages], empty[kStages];  // per stage: its data has arrived; all warps are done with it
    float levels[16];                       // levels of a lookup format
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const LinearCall& call;
  Shared& shared;
  int panel, lane, g, t;      // panel: index of this warp's panel in the CTA
  const uint8_t *weight, *x;  // the panel; the rows of reordered activations
  using Sums = Sum[kRows / 8][4];
  Sums& sum;  // [j][i]: row 8j + 2t + i % 2, column 2g + i / 2

  // Addresses of the 16-byte pieces of its panel's next tile that this lane copies, in global memory.
  struct Source {
    int tile;
    const uint8_t *codes, *scales;  // scales: of group 0
  };
  LOWBIT_INLINE Source source_of(int tile) const {
    return {.tile = tile,
            .codes = weight + call.sections.codes + static_cast<int64_t>(tile) * kTileBytes + lane * 16,
            .scales = weight + (is_zero() ? call.sections.zero : call.sections.group_scale) + lane % 2 * 16};
  }
  LOWBIT_INLINE bool is_zero() const { return kAsymmetric && lane / 2 % 2; }

  // Copies a tile of the panel, and advances to the next.
  LOWBIT_INLINE void copy_weight(Stage& stage, Source& from) const {
    const auto copy_16 = [](void* to, const void* from) {
      copy_async(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(from), true);
    };
#pragma unroll
    for (int at = 0; at < kTileBytes; at += 32 * 16)
      if (at + 32 * 16 <= kTileBytes || at + lane * 16 < kTileBytes)
        copy_16(stage.codes[panel] + at + lane * 16, from.codes + at);
    from.codes += kTileBytes;
    if constexpr (kTileGroups > 0) {
      const int of_tile = (from.tile * kScales + lane / (2 * kPairs)) >> call.group_shift, last = call.groups - 1;
      if (lane < kScales * kPairs * 2 && (is_zero() || call.spec.group_size))
        copy_16(stage.scales[panel][0][0] + lane * 8, from.scales + (of_tile < last ? of_tile : last) * 32);
    }
    from.tile++;
  }

  // Called by one lane: copies all activations of a tile.
  LOWBIT_INLINE void copy_activations(int tile, int at) const {
    constexpr int kBytes = kRows / kRowsAtOnce * kBlockBytes;
    arrive_expecting(shared.full[at], kBytes);
    copy_bulk(shared.ring[at].x, x + static_cast<int64_t>(tile) * kBytes, kBytes, shared.full[at]);
  }

  struct Scale {
    float scale, less;   // weight = (level - less) * scale
    uint32_t high, low;  // for units of fragments: two parts of bfloat16, each twice
    uint32_t half;       // twice
  };
  LOWBIT_INLINE void scales_of(const Stage& stage, int part, Scale (&of)[2]) const {
    const auto pair = [&](bool zero) {
      return *reinterpret_cast<const uint32_t*>(stage.scales[panel][part][zero] + 2 * g);
    };
    const uint32_t scales = kTileGroups && call.spec.group_size ? pair(false) : 0x3c003c00u,
                   zeros = kAsymmetric ? pair(true) : 0;
#pragma unroll
    for (int column = 0; column < 2; column++) {
      Scale& made = of[column];
      made.scale = float_of_half(scales >> 16 * column);
      made.less = kAsymmetric ? float_of_half(zeros >> 16 * column) : static_cast<float>(symmetric_zero(kFormat));
      const uint32_t whole = __float_as_uint(made.scale * kUnit), high = whole & 0xffff0000u,
                     low = __float_as_uint(__uint_as_float(whole) - __uint_as_float(high));  // 11 bits: exact
      made.high = high | high >> 16, made.low = low | low >> 16;
      made.half = __byte_perm(scales, 0, column ? 0x3232 : 0x1010);
    }
  }

  // The weights of a step as the first factor.
  LOWBIT_INLINE void decode(const LaneTile<kFormat>& tile, int step, const Scale (&scale)[2], uint32_t (&a)[4]) const {
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = computed(tile.words.bytes(2 * step + i / 2, i % 2, t));
    } else if constexpr (kFragments) {
      uint32_t parts[1][4];
      tile.fragments(step, t, nullptr, parts);
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = kTileGroups ? scale_bf16x2(parts[0][i], scale[i % 2].high, scale[i % 2].low) : parts[0][i];
    } else if constexpr (kHalves) {
      // In the low mantissa bits of 2^10, which is then subtracted.
      constexpr uint32_t kTwoTo10 = 0x64006400u, kLess = (0x6400u + symmetric_zero(kFormat)) * 0x10001u;
#pragma unroll
      for (int column = 0; column < 2; column++) {
        const uint32_t bytes = tile.words.bytes(step, column, t);
        a[column] = scale_f16x2((bytes & 0x00ff00ffu) | kTwoTo10, kLess, scale[column].half);
        a[2 + column] = scale_f16x2((bytes >> 8 & 0x00ff00ffu) | kTwoTo10, kLess, scale[column].half);
      }
    } else {
#pragma unroll
      for (int column = 0; column < 2; column++) {
        float level[4];
        tile.levels(step, column, t, shared.levels, level);
        if constexpr (!is_float(kFormat))
#pragma unroll
          for (float& of : level) of = (of - scale[column].less) * scale[column].scale;
        a[column] = pair_of<kDtype>(level[0], level[2]), a[2 + column] = pair_of<kDtype>(level[1], level[3]);
      }
    }
  }

  // a: registers of the first factor, which products of the tile before read until they are complete.
  LOWBIT_INLINE void use(int at, bool first, uint32_t (&a)[kSteps][4]) {
    const Stage& stage = shared.ring[at];
    LaneTile<kFormat> tile;
    tile.template load<FromShared>(stage.codes[panel], g, t);
    Scale scale[2];
    wait_for_products<0>();
    if (!first && lane == 0) arrive(shared.empty[at == 0 ? kStages - 1 : at - 1]);
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      if constexpr (!kCodes && !is_float(kFormat))
        if (step % (kSteps / kScales) == 0) scales_of(stage, step / (kSteps / kScales), scale);
      decode(tile, step, scale, a[step]);
    }
    begin_products();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const bool adds = step > 0 || !first;
      if constexpr (kCodes) multiply_by_shared<kBlockBytes>(sum, a[step], stage.x[0] + step * 256, adds);
      else multiply_by_shared<kDtype, kBlockBytes>(sum, a[step], stage.x[0] + step * 256, adds);
    }
    commit_products();
  }

  // Before waiting for other kernels: prefetches the codes of the first tiles of the panel.
  LOWBIT_INLINE void prefetch(int begin, int end) const {
    const int tiles = static_cast<int>(smaller(end - begin, kStages - 2));
    if (lane == 0 && tiles > 0) prefetch_to_l2(weight + call.sections.codes + begin * kTileBytes, tiles * kTileBytes);
  }

  LOWBIT_INLINE void run(int begin, int end) {
    Source from = source_of(begin);
    for (int i = 0; i < kStages - 2; i++) {
      if (from.tile < end) {
        if (i % kWarps == panel && lane == 0) copy_activations(from.tile, i);  // tile i is copied by warp i % kWarps
        copy_weight(shared.ring[i], from);
      }
      commit_copies();
    }
    uint32_t a[kSteps][4];
    for (int tile = begin, at = 0, phase = 0; tile < end; tile++) {
      if (from.tile < end) {
        const int to = at < 2 ? at + kStages - 2 : at - 2;  // stage of the tile before the last
        if ((from.tile - begin) % kWarps == panel && lane == 0) {
          wait_for(shared.empty[to], at < 2 ? phase ^ 1 : phase);  // other warps may be behind
          copy_activations(from.tile, to);
        }
        copy_weight(shared.ring[to], from);
      }
      commit_copies();
      wait_for_groups<kStages - 2>();
      __syncwarp();
      wait_for(shared.full[at], phase);
      use(at, tile == begin, a);
      if (++at == kStages) at = 0, phase ^= 1;
    }
    wait_for_products<0>();
    hold(sum);
  }

  LOWBIT_INLINE void hand_over() const {
#pragma unroll
    for (int j = 0; j < kRows / 8; j++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // for two columns
        *reinterpret_cast<uint2*>(&shared.results[8 * j + 2 * t + i][panel * kPanelColumns + 2 * g]) = {
            __builtin_bit_cast(uint32_t, sum[j][i]), __builtin_bit_cast(uint32_t, sum[j][2 + i])};
      }
  }
};

template <Format kFormat, bool kCodes, DType kDtype, int kTileGroups, bool kAsymmetric, int kRows>
LOWBIT_INLINE void linear_wgmma(const WgmmaCall& given) {
  using P = WgmmaProduct<kFormat, kCodes, kDtype, kTileGroups, kAsymmetric, kRows>;
  constexpr int kWarps = P::kWarps, kColumns = P::kShape.columns();
  LOWBIT_DYNAMIC_SHARED(typename P::Shared, shared);
  const ProductCall& product = given.product;
  const LinearCall& call = product.call;
  const auto blocks = static_cast<int>(ceil_div(call.m, kRows)), cta = static_cast<int>(blockIdx.x) / product.splits;
  const int first_panel = cta / blocks * kWarps, first_row = cta % blocks * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int split = static_cast<int>(blockIdx.x) % product.splits, of_split = ceil_div(call.tiles, product.splits),
            begin = split * of_split, end = static_cast<int>(smaller(begin + of_split, call.tiles));
  let_next_begin();
  if constexpr (is_table(kFormat))
    if (threadIdx.x < 16) shared.levels[threadIdx.x] = codec_of<kFormat>::level(static_cast<int>(threadIdx.x));
  if (threadIdx.x < P::kStages) {
    set_up(shared.full[threadIdx.x], 1), set_up(shared.empty[threadIdx.x], kWarps);
    show_barriers();
  }
  __syncthreads();
  const int last_panel = static_cast<int>(call.spec.panels()) - 1;  // repeated past the end
  typename P::Sums sum;
  P part{.call = call, .shared = shared, .panel = warp, .lane = lane, .g = lane / 4, .t = lane % 4,
         .weight = call.weight + smaller(first_panel + warp, last_panel) * call.sections.row_bytes,
         .x = static_cast<const uint8_t*>(call.ordered) +
              static_cast<int64_t>(first_row / kRowsAtOnce) * call.tiles * P::kBlockBytes,
         .sum = sum};
  part.prefetch(begin, end);
  wait_for_kernels_before();
  part.run(begin, end);
  __syncthreads();  // all warps are done with the ring
  part.hand_over();
  __syncthreads();
  // A thread has four columns of some rows.
  constexpr int kFours = kColumns / 4;
  const int four = static_cast<int>(threadIdx.x) % kFours;
  const int64_t n = first_panel * kPanelColumns + four * 4;
  if (n >= call.spec.n) return;
  ColumnEnds ends[4];
  if (product.splits == 1) ends_of_four<kFormat>(call, n, ends);
  for (int of_cta = static_cast<int>(threadIdx.x) / kFours; of_cta < kRows; of_cta += kWarps * 32 / kFours) {
    const int64_t row = first_row + of_cta;
    if (row >= call.m) return;
    typename P::Sum whole[4];
    load_four(&shared.results[of_cta][four * 4], true, 4, whole);
    if constexpr (P::kUnit != 1.0f && kTileGroups == 0)
#pragma unroll
      for (auto& of : whole) of *= P::kUnit;
    if (product.splits == 1) {
      store_four_wholes<kFormat, kCodes, kTileGroups>(call, ends, row, n, whole);
    } else {
      store_four_sums(static_cast<typename P::Sum*>(product.partial) + (split * call.m + row) * call.spec.n + n,
                      call.spec.n % 4 == 0, call.spec.n - n, whole);
    }
  }
}

}  // namespace lowbit::cuda
