// SPDX-License-Identifier: Apache-2.0
// Attention's operands for the tile unit: rows of activations, and matrices packed as the tiles that they are
// multiplied by. Every float is cut into kParts of bfloat16 (cpu/tiles.hpp).
#pragma once

#include "cpu/attention/visible.hpp"
#include "cpu/tiles.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kTileRows = TileUnit::kRows, kTileBytes = 1024;
constexpr int64_t kStep = 32, kStepBytes = 64;  // a product sums over that many bfloat16, a row of a tile

LOWBIT_INLINE int64_t steps_of(int64_t columns) { return ceil_div(columns, kStep); }

// The most bytes that a thread or a call packs at a time. 16384 queries of head dimension 128 and one kv head, in
// one part.
constexpr int64_t kMostPackedBytes = 64 << 20;

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

// 32 floats in parts, each rounded to 8 bits: of float16 two are exact, of a float32 they leave 2^-9 and 2^-18 of it.
template <int kParts>
LOWBIT_INLINE void cut_rounded(f32x16 first, f32x16 second, uint8_t* to) {
  unroll<kParts>([&](auto part) {
    uint16_t* at = reinterpret_cast<uint16_t*>(to + part * kStepBytes);
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

// The element type of rows that are cut into kParts.
template <int kParts>
using Whole = std::conditional_t<kParts == 1, bfloat16_bits, float16_bits>;

// One row of elements in parts; zeros up to the end of the last step.
template <int kParts>
void cut_row(const Whole<kParts>* from, int64_t columns, uint8_t* to) {
  const int64_t whole = columns / kStep * kStep;
  const auto cut_step = [&](const Whole<kParts>* step) {
    if constexpr (kParts == 1) std::memcpy(to, step, kStepBytes);
    else cut_rounded<kParts>(load16(step), load16(step + 16), to);
    to += kParts * kStepBytes;
  };
  for (int64_t c = 0; c < whole; c += kStep) cut_step(from + c);
  if (whole == columns) return;
  Whole<kParts> last[kStep] = {};
  std::memcpy(last, from + whole, (columns - whole) * sizeof(last[0]));
  cut_step(last);
}

template <int kParts>
void cut_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, PartRows to) {
  const auto* from = reinterpret_cast<const Whole<kParts>*>(head.data) + first * head.stride;
  for (int64_t r = 0; r < rows; r++) cut_row<kParts>(from + r * head.stride, columns, to.row(r));
}

// Rows of codes, rounded; buffer: as many rows of floats.
template <int kParts>
void round_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, Matrix<float> buffer, PartRows to) {
  widen_rows(head, first, rows, columns, 1.0f, buffer);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c += kStep)
      cut_rounded<kParts>(load(buffer.row(r) + c), c + 16 < columns ? load(buffer.row(r) + c + 16) : set1(0.0f),
                          to.row(r) + c / kStep * to.step);
}

// Rows of a head as columns of tiles, to be summed over `columns`: [rows / 16][columns / 32][part], with 16 rows as the
// columns of a tile. Zeros where there is no row, up to a multiple of 32. buffer: 16 rows; floats: too, for codes.
template <int kParts>
void pack_transposed(const HeadView& head, int64_t first, int64_t rows, int64_t columns, PartRows buffer, uint8_t* to,
                     Matrix<float> floats = {}) {
  const int64_t width = steps_of(columns) * kParts;
  for (int64_t r = 0; r < round_up(rows, kStep); r += kTileRows, to += width * kTileBytes) {
    const int64_t count = larger(0, smaller(kTileRows, rows - r));
    if (head.scale) round_rows<kParts>(head, first + r, count, columns, floats, buffer);
    else cut_rows<kParts>(head, first + r, count, columns, buffer);
    for (int64_t i = count; i < kTileRows; i++) std::memset(buffer.row(i), 0, width * kStepBytes);
    for (int64_t i = 0; i < width; i++)
      transpose_16x16(reinterpret_cast<const float*>(buffer.data + i * kStepBytes), buffer.stride / 4,
                      reinterpret_cast<float*>(to + i * kTileBytes), 16);
  }
}

// Rows of a head, to be summed over: [columns / 16][rows / 32][part], zeros where there is no row. buffer: 32 rows.
template <int kParts>
void pack_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, int64_t most_rows,
               Matrix<float> buffer, uint8_t* to) {
  for (int64_t r = 0; r < rows; r += kStep) {
    const int64_t count = smaller(kStep, rows - r);
    widen_rows(head, first + r, count, columns, 1.0f, buffer);
    clear_rows(buffer.from(count), kStep - count);
    for (int64_t c = 0; c < columns; c += 16)
      for (int64_t i = 0; i < kStep; i += 2) {
        i32x16 pairs[kParts];
        cut_rounded(load(buffer.row(i) + c), load(buffer.row(i + 1) + c), pairs);
        uint8_t* tiles = to + (c / 16 * steps_of(most_rows) + r / kStep) * kParts * kTileBytes + i / 2 * kStepBytes;
        unroll<kParts>(
            [&](auto part) { store_i32(reinterpret_cast<int32_t*>(tiles + part * kTileBytes), pairs[part]); });
      }
  }
}

// The pairs of two parts that are multiplied: all four, or not that of both second parts, which is 2^-16 of the whole
// at most. Scores need all: lse would show the difference.
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
        const int64_t first = product.steps.begin;
        multiply_parts<kParts, kPairs, kRowTiles, kPanels>(
            product.steps.end - first,
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

// The columns that some row sees, in whole steps of the products.
LOWBIT_INLINE Span steps_seen(const Visible<float>& visible, int64_t rows) {
  if (!visible.spans) return {0, static_cast<int>(round_up(visible.all.end, kStep))};
  Span seen{visible.all.end, 0};
  for (int64_t t = 0; t < product_tiles(rows).count; t++) {
    if (visible.spans[t].begin >= visible.spans[t].end) continue;
    seen.begin = static_cast<int>(smaller(seen.begin, visible.spans[t].begin));
    seen.end = static_cast<int>(larger(seen.end, visible.spans[t].end));
  }
  return {static_cast<int>(seen.begin / kStep * kStep), static_cast<int>(round_up(seen.end, kStep))};
}
LOWBIT_INLINE Span over(Span columns, int64_t size) {
  return {static_cast<int>(columns.begin / size), static_cast<int>(columns.end / size)};
}

// Scales the products in `rows` rows and the columns of a span.
LOWBIT_INLINE void scale_rows(Matrix<float> scores, int64_t rows, Span columns, float scale) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = columns.begin; c < columns.end; c += 16)
      store(scores.row(r) + c, mul(load(scores.row(r) + c), set1(scale)));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
