// SPDX-License-Identifier: Apache-2.0
// Products of two float matrices by the tile unit, which multiplies bfloat16 and adds in float32 (cpu/simd/amx.hpp,
// avx512_bf16.hpp): activations by activations, as tile_products.hpp has them for vectors of float32. A float is cut
// into kParts of bfloat16, each what rounding left of it: 1 is exact for bfloat16, 2 for float16.
//
//   the left factor a    PartRows: cut_rows of a, or cut_columns of its transpose
//   the right factor b   tiles [columns / 16][depth / 32][part]: pack_tiles of b, or transpose_parts of the rows of its
//                        transpose
//   multiply<kParts>     c = a b or c += a b, in whole tiles of 16 rows and columns, of the depth in whole steps of 32
//
// Behind the last of the depth both factors have zeros, up to the end of the step; a matrix that is cut or packed has
// them up to the next multiple of 16.
#pragma once

#include "cpu/tile_products.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileBytes = 1024;
constexpr int64_t kStep = 32, kStepBytes = 64;  // a product sums over that many bfloat16, a row of a tile

LOWBIT_INLINE int64_t steps_of(int64_t columns) { return ceil_div(columns, kStep); }

// Rows of tiles of activations, from any row on, [row][columns / 32][part] of 32 bfloat16, or as activations whose part
// is contiguous, [row][part][columns / 32]. Rows are 64 * odd bytes apart, so that those of a tile fall into different
// sets of L1.
struct PartRows {
  uint8_t* data = nullptr;
  int64_t stride = 0, step = 0, part = 0;  // bytes, from one to the next
  LOWBIT_INLINE uint8_t* row(int64_t r) const { return data + r * stride; }
  LOWBIT_INLINE PartRows from(int64_t r) const { return {row(r), stride, step, part}; }
};

template <int kParts>
LOWBIT_INLINE PartRows part_rows(int64_t rows, int64_t columns, Arena& arena) {
  const int64_t stride = (steps_of(columns) * kParts | 1) * kStepBytes;
  return {arena.array<uint8_t>(rows * stride), stride, kParts * kStepBytes, kStepBytes};
}

// 32 floats in parts, each rounded to 8 bits: of float16 two are exact, of a float32 they leave 2^-8 and 2^-16 at most.
template <int kParts>
LOWBIT_INLINE void cut_rounded(f32x16 first, f32x16 second, uint8_t* to, int64_t part_bytes = kStepBytes) {
  unroll<kParts>([&](auto part) {
    uint16_t* at = reinterpret_cast<uint16_t*>(to + part * part_bytes);
    store_32_bf16(at, first, second);
    if constexpr (part + 1 < kParts) first = sub(first, load_bf16(at)), second = sub(second, load_bf16(at + 16));
  });
}
// Likewise for the floats at an even k and at the next, in pairs as a tile of weights has them.
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

// The left factor from the columns of a span of rows of floats; zeros up to the end of the last step.
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

// The left factor a from 32 rows of its transpose: step `step` of as many rows of a as they have columns, up to the
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

// The right factor from the columns of a span, from a multiple of 16 on, of `steps` steps of 32 rows of floats;
// b_steps: those that b has memory for.
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

// The pairs of two parts that are multiplied: all four, or not that of both second parts, which is 2^-16 of the whole
// at most.
enum class Pairs { all, not_last };

// Sums of kRowTiles x kPanels tiles += those of `steps` steps; activations(r, part), weights(p, part): where the tiles
// of the first lie. One side stays from pair to pair: three are 12 products and 8 loads. `meanwhile` is called after
// each step.
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

// A product of tiles: c = a b or c += a b, of `row_tiles` tiles of rows of a, over the steps of a span; b: packed, of
// `b_steps` steps, of which the panels (16 columns) of a span are wanted. `meanwhile` is called after every step.
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
        // Of ints gcc knows that addresses of steps do not overflow: its loops then count by one, without a counter.
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

// A span of columns in tiles or steps of `size` columns.
LOWBIT_INLINE Span over(Span columns, int64_t size) {
  return {columns.begin / size, columns.end / size};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
