// SPDX-License-Identifier: Apache-2.0
// linear of 17 rows and more on compute capability 9.0, by products of warpgroups: the weight is their first factor, in
// registers, where each warp decodes the panel of 16 columns that is its own; activations are the second, in shared
// memory, and all 16 warps of a CTA share them. What a tile needs is copied to a ring of stages in shared memory, some
// tiles ahead. A warp decodes 16 k of its columns while those before are multiplied.
//
// Weights with scales by groups of k are rounded once to 16 bits, as those that cuBLAS multiplies (decoded.cuh).
#pragma once

#include "cuda/device/wgmma.cuh"
#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "cuda/linear/product.cuh"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

// A row's 16-byte halves of 16 k, as matrices of 8 rows: k 0, 2 ... 14 of a chunk, then k 1, 3 ... 15 (of codes all 16
// in their order). kCodes: quantize_rows of gpu/linear/activations.cuh does the same.
LOWBIT_INLINE void order_matrices(const LinearCall& call) {
  const int64_t chunks = call.tiles * kChunks, at = static_cast<int64_t>(blockIdx.x) * kLinearThreads + threadIdx.x;
  const int64_t row = at / chunks, chunk = at % chunks;
  if (row >= call.m) return;
  uint32_t words[8];
  const auto* x = static_cast<const uint16_t*>(call.x) + row * call.spec.k + chunk * 16;
  if (reinterpret_cast<std::size_t>(call.x) % 16 == 0 && call.spec.k % 16 == 0) {
    const uint4 first = chunk * 16 < call.spec.k ? *reinterpret_cast<const uint4*>(x) : uint4{},
                second = chunk * 16 < call.spec.k ? *reinterpret_cast<const uint4*>(x + 8) : uint4{};
    words[0] = first.x, words[1] = first.y, words[2] = first.z, words[3] = first.w;
    words[4] = second.x, words[5] = second.y, words[6] = second.z, words[7] = second.w;
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const auto of = [&](int k) { return chunk * 16 + k < call.spec.k ? uint32_t{x[k]} : 0u; };
      words[i] = of(2 * i) | of(2 * i + 1) << 16;
    }
  }
  uint32_t halves[2][4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    halves[0][i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x5410);
    halves[1][i] = __byte_perm(words[2 * i], words[2 * i + 1], 0x7632);
  }
  auto* to = static_cast<uint4*>(call.ordered) +
             ((row / kRowsAtOnce * chunks + chunk) * 2 * kRowsAtOnce + row % kRowsAtOnce);
  to[0] = {halves[0][0], halves[0][1], halves[0][2], halves[0][3]};
  to[kRowsAtOnce] = {halves[1][0], halves[1][1], halves[1][2], halves[1][3]};
}

// kCodes: int8 activations, with one scale a row, of a weight with one scale a column; else of kDtype.
template <Format kFormat, bool kCodes, DType kDtype, int kTileGroups, bool kAsymmetric, int kRows>
struct WgmmaProduct {
  static_assert(kTileGroups > 0 || !kAsymmetric);
  static_assert(!kCodes || kTileGroups == 0);
  static constexpr WgmmaShape kShape{bits(kFormat), kCodes, kTileGroups, kAsymmetric, kRows};
  // By parts of bfloat16 in the units that fragments come in, with their scales; or weight by weight.
  static constexpr bool kFragments = !kCodes && kDtype == DType::bfloat16 && !kAsymmetric && !is_float(kFormat) && !is_table(kFormat) &&
                                     kWeightParts<kFormat> == 1;
  static constexpr float kUnit = kFragments && is_integer(kFormat) ? kUnitOfIntegers : 1.0f;
  using Sum = std::conditional_t<kCodes, int32_t, float>;
  static constexpr int kStages = kShape.stages(), kSteps = kCodes ? kChunks / 2 : kChunks,
                       kScales = kTileGroups ? kTileGroups : 1, kPairs = kAsymmetric ? 2 : 1,
                       kTileBytes = 128 * kShape.bits, kBlockBytes = kSteps * 256;  // of 8 rows of activations

  struct Stage {
    alignas(16) uint8_t x[kRows / kRowsAtOnce][kBlockBytes];
    uint8_t codes[kWgmmaPanels][kTileBytes];
    uint16_t scales[kWgmmaPanels][kScales][kPairs][kPanelColumns];  // and zero points
  };
  static_assert(sizeof(Stage) == kShape.stage_bytes());
  struct Shared {
    union {
      Stage ring[kStages];
      Sum results[kRows][kWgmmaPitch];
    };
    float levels[16];  // of a lookup format
  };
  static_assert(sizeof(Shared) == kShape.bytes());

  const LinearCall& call;
  Shared& shared;
  int first_row, panel, lane, g, t;  // panel: of this warp in its CTA
  const uint8_t* weight;             // its panel
  using Sums = Sum[kRows / 8][4];
  Sums& sum;  // [j][i]: of row 8j + 2t + i % 2, column 2g + i / 2

  LOWBIT_INLINE void copy(Stage& stage, int tile) const {
    constexpr int kAtOnce = kWgmmaThreads * 16;
    const auto* x = static_cast<const uint8_t*>(call.ordered) +
                    (static_cast<int64_t>(first_row / kRowsAtOnce) * call.tiles + tile) * kBlockBytes;
#pragma unroll
    for (int at = static_cast<int>(threadIdx.x) * 16; at < kRows / kRowsAtOnce * kBlockBytes; at += kAtOnce)
      copy_16(stage.x[0] + at, x + static_cast<int64_t>(at / kBlockBytes) * call.tiles * kBlockBytes + at % kBlockBytes);
    const uint8_t* codes = weight + call.sections.codes + static_cast<int64_t>(tile) * kTileBytes;
#pragma unroll
    for (int at = 0; at < kTileBytes; at += 32 * 16)
      if (at + 32 * 16 <= kTileBytes || at + lane * 16 < kTileBytes)
        copy_16(stage.codes[panel] + at + lane * 16, codes + at + lane * 16);
    if constexpr (kTileGroups > 0) {
      const bool zero = kAsymmetric && lane / 2 % 2;
      const int of_tile = (tile * kScales + lane / (2 * kPairs)) >> call.group_shift, last = call.groups - 1;
      if (lane < kScales * kPairs * 2 && (zero || call.spec.group_size))
        copy_16(stage.scales[panel][0][0] + lane * 8,
                weight + (zero ? call.sections.zero : call.sections.group_scale) +
                    (of_tile < last ? of_tile : last) * 32 + lane % 2 * 16);
    }
  }
  LOWBIT_INLINE static void copy_16(void* to, const void* from) {
    copy_async(static_cast<uint16_t*>(to), static_cast<const uint16_t*>(from), true);
  }

  struct Scale {
    float scale, less;    // weight = (level - less) * scale
    uint32_t high, low;   // of units of fragments: two parts of bfloat16, twice each
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
    }
  }

  // The weights of a step as the first factor.
  LOWBIT_INLINE void decode(const LaneTile<kFormat>& tile, int step, const Scale (&scale)[2], uint32_t (&a)[4]) const {
    if constexpr (kCodes) {
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = tile.words.bytes(2 * step + i / 2, i % 2, t);
    } else if constexpr (kFragments) {
      uint32_t parts[1][4];
      tile.fragments(step, t, nullptr, parts);
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = kTileGroups ? scale_bf16x2(parts[0][i], scale[i % 2].high, scale[i % 2].low) : parts[0][i];
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

  // a: registers of the first factor, which products read while the next ones are filled.
  LOWBIT_INLINE void use(const Stage& stage, bool first, uint32_t (&a)[2][4]) {
    LaneTile<kFormat> tile;
    tile.template load<FromShared>(stage.codes[panel], g, t);
    Scale scale[2];
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      if constexpr (!kCodes && !is_float(kFormat))
        if (step % (kSteps / kScales) == 0) scales_of(stage, step / (kSteps / kScales), scale);
      decode(tile, step, scale, a[step % 2]);
      begin_products();
      const bool adds = step > 0 || !first;
      if constexpr (kCodes) multiply_by_shared<kBlockBytes>(sum, a[step % 2], stage.x[0] + step * 256, adds);
      else multiply_by_shared<kDtype, kBlockBytes>(sum, a[step % 2], stage.x[0] + step * 256, adds);
      commit_products();
      wait_for_products<1>();  // the registers of the step before are free
    }
  }

  LOWBIT_INLINE void run(int begin, int end) {
#pragma unroll
    for (int i = 0; i < kStages - 2; i++) {
      if (begin + i < end) copy(shared.ring[i], begin + i);
      commit_copies();
    }
    uint32_t a[2][4];
    for (int tile = begin, at = 0; tile < end; tile++) {
      wait_for_groups<kStages - 3>();
      show_to_products();
      __syncthreads();  // this tile is there, and products of the one before the last are done
      if (const int ahead = tile + kStages - 2; ahead < end)
        copy(shared.ring[at < 2 ? at + kStages - 2 : at - 2], ahead);
      commit_copies();
      use(shared.ring[at], tile == begin, a);
      at = at + 1 == kStages ? 0 : at + 1;
    }
    wait_for_products<0>();
    hold(sum);
  }

  LOWBIT_INLINE void hand_over() {
    __syncthreads();  // every warp is done with the ring
#pragma unroll
    for (int j = 0; j < kRows / 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        shared.results[8 * j + 2 * t + i % 2][panel * kPanelColumns + 2 * g + i / 2] = sum[j][i];
    __syncthreads();
  }
};

template <Format kFormat, bool kCodes, DType kDtype, int kTileGroups, bool kAsymmetric, int kRows>
LOWBIT_INLINE void linear_wgmma(const WgmmaCall& given) {
  using P = WgmmaProduct<kFormat, kCodes, kDtype, kTileGroups, kAsymmetric, kRows>;
  LOWBIT_DYNAMIC_SHARED(typename P::Shared, shared);
  const ProductCall& product = given.product;
  const LinearCall& call = product.call;
  const auto blocks = static_cast<int>(ceil_div(call.m, kRows)), cta = static_cast<int>(blockIdx.x) / product.splits;
  const int first_panel = cta / blocks * kWgmmaPanels, first_row = cta % blocks * kRows;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int split = static_cast<int>(blockIdx.x) % product.splits, of_split = ceil_div(call.tiles, product.splits),
            end = static_cast<int>(smaller((split + 1) * of_split, call.tiles));
  if constexpr (is_table(kFormat)) {
    if (threadIdx.x < 16) shared.levels[threadIdx.x] = codec_of<kFormat>::level(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  const int last_panel = static_cast<int>(call.spec.panels()) - 1;  // again, where there is no other
  typename P::Sums sum;
  P part{.call = call, .shared = shared, .first_row = first_row, .panel = warp, .lane = lane, .g = lane / 4,
         .t = lane % 4, .weight = call.weight + smaller(first_panel + warp, last_panel) * call.sections.row_bytes,
         .sum = sum};
  part.run(split * of_split, end);
  part.hand_over();
  for (int at = static_cast<int>(threadIdx.x); at < kRows * kWgmmaColumns; at += kWgmmaThreads) {
    const int64_t row = first_row + at / kWgmmaColumns, n = first_panel * kPanelColumns + at % kWgmmaColumns;
    if (row >= call.m || n >= call.spec.n) continue;
    typename P::Sum whole = shared.results[at / kWgmmaColumns][at % kWgmmaColumns];
    if constexpr (P::kUnit != 1.0f && kTileGroups == 0) whole *= P::kUnit;
    if (product.splits == 1) store_whole<kFormat, kCodes, kTileGroups>(call, row, n, whole);
    else static_cast<typename P::Sum*>(product.partial)[(split * call.m + row) * call.spec.n + n] = whole;
  }
}

}  // namespace lowbit::cuda
