// SPDX-License-Identifier: Apache-2.0
// Products of two float matrices on the tile unit, which multiplies bfloat16 and accumulates in float32
// (cpu/simd/amx.hpp, avx512_bf16.hpp): activations by activations, the counterpart of tile_products.hpp, which uses
// float32 vectors. A float is cut into kParts of bfloat16, each the rounded remainder of those before: 1 is exact for
// bfloat16, 2 for float16.
//
//   the left factor a    PartRows: cut_rows of a, or cut_columns of its transpose
//   the right factor b   tiles [columns / 16][depth / 32][part]: pack_tiles of b, or transpose_parts of the rows of its
//                        transpose
//   multiply<kParts>     c = a b or c += a b, in whole tiles of 16 rows and columns, over a depth in whole steps of 32
//
// Both factors are padded with zeros along the depth, to the end of the step, and a matrix that is cut or packed up to
// the next multiple of 16.
#pragma once

#include "cpu/tile_products.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileBytes = 1024;
constexpr int64_t kStep = 32, kStepBytes = 64;  // depth of one product of tiles, in bfloat16; bytes of a tile's row

LOWBIT_INLINE int64_t steps_of(int64_t columns) { return ceil_div(columns, kStep); }

// Rows of activation tiles, from any row on, as [row][columns / 32][part] of 32 bfloat16, or with contiguous parts
// as [row][part][columns / 32]. The row stride is 64 * odd bytes, so that the rows of a tile fall into different
// sets of L1.
struct PartRows {
  uint8_t* data = nullptr;
  int64_t stride = 0, step = 0, part = 0;  // strides in bytes
  LOWBIT_INLINE uint8_t* row(int64_t r) const { return data + r * stride; }
  LOWBIT_INLINE PartRows from(int64_t r) const { return {row(r), stride, step, part}; }
};

template <int kParts>
LOWBIT_INLINE PartRows part_rows(int64_t rows, int64_t columns, Arena& arena) {
  const int64_t stride = (steps_of(columns) * kParts | 1) * kStepBytes;
  return {arena.array<uint8_t>(rows * stride), stride, kParts * kStepBytes, kStepBytes};
}

// 32 floats in parts of 8 bits, rounded: two are exact for float16; for float32 the error is 2^-8 after one, 2^-16
// after two.
template <int kParts>
LOWBIT_INLINE void cut_rounded(f32x16 first, f32x16 second, uint8_t* to, int64_t part_bytes = kStepBytes) {
  unroll<kParts>([&](auto part) {
    uint16_t* at = reinterpret_cast<uint16_t*>(to + part * part_bytes);
    store_32_bf16(at, first, second);
    if constexpr (part + 1 < kParts) first = sub(first, load_bf16(at)), second = sub(second, load_bf16(at + 16));
  });
}
// Likewise for the floats at an even k and the next, interleaved in pairs as in a tile of weights.
template <int kParts>
LOWBIT_INLINE void cut_rounded(f32x16 even, f32x16 odd, i32x16 (&pairs)[kParts]) {
  unroll<kParts>([&](auto part) {
    pairs[part] = bf16_pairs(even, odd);
    if constexpr (part + 1 < kParts) {
      even = sub(even, float_of(shift_left<16>(pairs[part])));
      odd = sub(odd, upper_part(float_of(pairs[part])));
    }
  });
}

// The left factor from a span of columns of rows of floats; zeros up to the end of the last step.
template <int kParts>
LOWBIT_INLINE void cut_rows(Matrix<float> from, int64_t rows, Span columns, PartRows to) {
  for (int64_t r = 0; r < rows; r++) {
    int64_t c = columns.begin;
    const auto cut_step = [&](f32x16 second) {
      cut_rounded<kParts>(load(from.row(r) + c), second, to.row(r) + c / kStep * to.step, to.part);
    };
    for (; c + 16 < columns.end; c += kStep) cut_step(load(from.row(r) + c + 16));
    if (c < columns.end) cut_step(set1(0.0f));
  }
}

// The left factor a from 32 rows of its transpose: step `step` for as many rows of a as those have columns, up to the
// next multiple of 16.
template <int kParts>
LOWBIT_INLINE void cut_columns(Matrix<float> from, int64_t columns, int64_t step, PartRows to) {
  for (int64_t c = 0; c < columns; c += kTileRows) {
    alignas(64) int32_t tiles[kParts][16 * 16];
    for (int64_t i = 0; i < 16; i++) {
      i32x16 pairs[kParts];
      cut_rounded(load(from.row(2 * i) + c), load(from.row(2 * i + 1) + c), pairs);
      unroll<kParts>([&](auto part) { store_i32(tiles[part] + 16 * i, pairs[part]); });
    }
    for (int64_t part = 0; part < kParts; part++)
      transpose_16x16(reinterpret_cast<const float*>(tiles[part]), 16,
                      reinterpret_cast<float*>(to.row(c) + part * to.part + step * to.step), to.stride / 4);
  }
}

// The right factor from a span of columns, starting at a multiple of 16, over `steps` steps of 32 rows of floats;
// b_steps: steps that b has memory for.
template <int kParts>
LOWBIT_INLINE void pack_tiles(Matrix<float> from, int64_t steps, Span columns, int64_t b_steps, uint8_t* to) {
  for (int64_t c = columns.begin; c < columns.end; c += 16)
    for (int64_t r = 0; r < steps * kStep; r += 2) {
      i32x16 pairs[kParts];
      cut_rounded(load(from.row(r) + c), load(from.row(r + 1) + c), pairs);
      uint8_t* tiles = to + (c / 16 * b_steps + r / kStep) * kParts * kTileBytes + r % kStep / 2 * kStepBytes;
      unroll<kParts>([&](auto part) { store_i32(reinterpret_cast<int32_t*>(tiles + part * kTileBytes), pairs[part]); });
    }
}

// 16 columns of the right factor from 16 rows of its transpose, `count` steps times parts.
LOWBIT_INLINE void transpose_parts(PartRows rows, int64_t count, uint8_t* to) {
  for (int64_t i = 0; i < count; i++)
    transpose_16x16(reinterpret_cast<const float*>(rows.data + i * kStepBytes), rows.stride / 4,
                    reinterpret_cast<float*>(to + i * kTileBytes), 16);
}

// The pairs of two parts that are multiplied: all four, or all but the pair of second parts, at most 2^-16
// of the whole.
enum class Pairs { all, not_last };

// Accumulators of kRowTiles x kPanels tiles += products over `steps` steps; activations(r, part) and weights(p, part)
// return the rows of the first tiles. One factor stays loaded from pair to pair: three pairs are 12 products and 8
// loads. Calls `meanwhile` after each step.
template <int kParts, Pairs kPairs, int kRowTiles, int kPanels, class Activations, class Weights, class F>
LOWBIT_INLINE void multiply_parts(int64_t steps, Activations&& activations, Weights&& weights, F&& meanwhile) {
  static_assert(kParts <= 2);
  if constexpr (kParts == 1) {
    multiply_steps<float, 0, kRowTiles, kPanels>(steps, [&](int r) { return activations(r, 0); },
                                                 [&](int p) { return weights(p, 0); }, meanwhile);
    return;
  }
  for (int64_t step = 0; step < steps; step++) {
    const auto pair = [&]<int kActivations, int kWeights, Loads kLoads>() __attribute__((always_inline)) {
      multiply_tiles<float, 0, kRowTiles, kPanels, kLoads>([&](int r) { return activations(r, kActivations).at(step); },
                                                           [&](int p) { return weights(p, kWeights).at(step).rows; });
    };
    if constexpr (kPairs == Pairs::all) pair.template operator()<1, 1, Loads::both>();
    pair.template operator()<1, 0, kPairs == Pairs::all ? Loads::weights : Loads::both>();
    pair.template operator()<0, 0, Loads::activations>();
    pair.template operator()<0, 1, Loads::weights>();
    meanwhile();
  }
}

// A product of tiles: c = a b or c += a b, for `row_tiles` tiles of rows of a, over a span of steps; b: packed with
// `b_steps` steps; a span of its panels (16 columns) is multiplied. Calls `meanwhile` after each step.
struct TileProduct {
  PartRows a;
  const uint8_t* b;
  int64_t b_steps;
  Matrix<float> c;
  int64_t row_tiles;
  Span panels, steps;
  Sum sum;
};

template <int kParts, Pairs kPairs, class F>
LOWBIT_INLINE void multiply(const TileProduct& product, F&& meanwhile) {
  TileUnit::before_loads();
  const int64_t panel_bytes = product.b_steps * kParts * kTileBytes, stride = product.c.stride * 4;
  for (int64_t p = product.panels.begin; p < product.panels.end; p += 2)
    for (int64_t r = 0; r < product.row_tiles; r += 2) {
      const auto block = [&](auto kRowTiles, auto kPanels) __attribute__((always_inline)) {
        const PartRows a = product.a.from(r * kTileRows);
        const uint8_t* b = product.b + p * panel_bytes;
        const auto place = [&](int t) {
          return product.c.row((r + t / kPanels) * kTileRows) + (p + t % kPanels) * kTileRows;
        };
        if (product.sum == Sum::fresh)
          unroll<kRowTiles * kPanels>([](auto t) { TileUnit::zero<t>(); });
        else
          unroll<kRowTiles * kPanels>([&](auto t) { TileUnit::load<t>(place(t), stride); });
        // With ints gcc knows that step addresses do not overflow, and counts loops without a separate counter.
        const int64_t first = static_cast<int>(product.steps.begin), end = static_cast<int>(product.steps.end);
        multiply_parts<kParts, kPairs, kRowTiles, kPanels>(
            end - first,
            [&](int i, int part) {
              return TileRows{a.row(i * kTileRows) + first * a.step + part * a.part, a.stride, a.step};
            },
            [&](int i, int part) {
              return TileRows{b + i * panel_bytes + (first * kParts + part) * kTileBytes, 64, kParts * kTileBytes};
            },
            meanwhile);
        unroll<kRowTiles * kPanels>([&](auto t) { TileUnit::store<t>(place(t), stride); });
      };
      with_count<2>(static_cast<int>(smaller(2, product.row_tiles - r)), [&](auto kRowTiles) {
        with_count<2>(static_cast<int>(smaller(2, product.panels.end - p)),
                      [&](auto kPanels) { block(kRowTiles, kPanels); });
      });
    }
}

template <int kParts, Pairs kPairs = Pairs::not_last>
[[gnu::noinline]] void multiply(const TileProduct& product) {
  multiply<kParts, kPairs>(product, [] {});
}

// A span of columns in units of `size` columns.
LOWBIT_INLINE Span over(Span columns, int64_t size) {
  return {columns.begin / size, columns.end / size};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
