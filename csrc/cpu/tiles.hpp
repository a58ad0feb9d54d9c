// SPDX-License-Identifier: Apache-2.0
// Products of tiles, for all ops, their factors as the unit reads them, and floats cut into the bfloat16 that tiles
// multiply: x = x0 + x1 + x2 of 8 bits each, exact for float32 in 3, for float16 in 2.
#pragma once

#include <cstring>

#include "core/scratch.hpp"
#include "cpu/loops.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Tiles that come from L2 each time, and in L1 would only displace the other factor's.
struct PassingRows {
  TileRows tiles;
  LOWBIT_INLINE PassingRows at(int64_t number) const { return {tiles.at(number)}; }
};

// Rows of activations and tiles of weights as the unit reads them: where it has several rows together in a register
// (kRowsTogether, simd/neon_tiles.hpp) they are joined in place, else they lie so already.
template <class Unit = TileUnit>
LOWBIT_INLINE void join_rows(void* rows, int64_t stride, int64_t count, int64_t bytes) {
  if constexpr (Unit::kRowsTogether == 2) {
    const Scratch first(bytes);
    char* row = static_cast<char*>(rows);
    for (int64_t r = 0; r < count; r += 2, row += 2 * stride) {
      std::memcpy(first.as<char>(), row, static_cast<size_t>(bytes));
      Unit::join_rows(first.as<char>(), row + stride, bytes, row);
    }
  }
}
template <class Unit = TileUnit>
LOWBIT_INLINE void join_columns(uint8_t* tiles, int64_t bytes) {
  if constexpr (Unit::kRowsTogether == 2) Unit::join_columns(tiles, bytes);
}

// The tiles that a product loads; the other factor's are still loaded from the product before.
enum class Loads { both, activations, weights };

template <int tile> LOWBIT_INLINE void load_activations(TileRows rows) { TileUnit::load<tile>(rows.rows, rows.stride); }
template <int tile, class Unit = TileUnit> LOWBIT_INLINE void load_activations(PassingRows rows) {
  Unit::template load_passing<tile>(rows.tiles.rows, rows.tiles.stride);
}

// Accumulators kFirst .. of kRowTiles x kPanels tiles += activations(r) * weights(p), which return the address of a
// tile. In an order that lets a product start while the next tile loads.
template <class Sum, int kFirst, int kRowTiles, int kPanels, Loads kLoads = Loads::both, class Activations,
          class Weights>
LOWBIT_INLINE void multiply_tiles(Activations&& activations, Weights&& weights) {
  unroll<kRowTiles>([&](auto r) __attribute__((always_inline)) {
    constexpr int kA = TileUnit::kActivations + (kFirst + r) % 2;
    if constexpr (kLoads != Loads::weights) load_activations<kA>(activations(r));
    unroll<kPanels>([&](auto p) __attribute__((always_inline)) {
      constexpr int kW = TileUnit::kWeights + (kFirst + p) % 2;
      if constexpr (r == 0 && kLoads != Loads::activations) TileUnit::load<kW>(weights(p), 64);
      TileUnit::add_products<Sum, kFirst + r * kPanels + p, kA, kW>();
    });
  });
}

// The same over consecutive `steps`; calls `meanwhile` after each. If accumulators can stay in registers over all of
// them, a pair of tiles is multiplied over all steps before the next pair.
template <class Sum, int kFirst, int kRowTiles, int kPanels, class Activations, class Weights,
          class Meanwhile = void (*)(), class Unit = TileUnit>
LOWBIT_INLINE void multiply_steps(
    int64_t steps, Activations&& activations, Weights&& weights, Meanwhile&& meanwhile = [] {}) {
  if constexpr (Unit::kSumsInRegisters) {
    unroll<kRowTiles>([&](auto r) __attribute__((always_inline)) {
      Unit::template add_steps<kFirst + r * kPanels, kPanels>(activations(r), weights, steps);
    });
    for (int64_t step = 0; step < steps; step++) meanwhile();
  } else {
    for (int64_t step = 0; step < steps; step++) {
      multiply_tiles<Sum, kFirst, kRowTiles, kPanels>([&](int r) { return activations(r).at(step); },
                                                      [&](int p) { return weights(p).at(step).rows; });
      meanwhile();
    }
  }
}

constexpr int32_t kUpperHalf = static_cast<int32_t>(0xffff0000);

// The top 8 bits of the mantissa of each of 16 floats; the remainder is exact. Truncated: one operation, where rounding
// takes nine, and no sum of parts exceeds the whole.
LOWBIT_INLINE f32x16 upper_part(f32x16 x) { return float_of(bit_and(bits_of(x), set1(kUpperHalf))); }

// The parts of the floats at an even k and the next, interleaved in pairs as in a tile: pairs[part].
template <int kParts>
LOWBIT_INLINE void cut(f32x16 even, f32x16 odd, i32x16 (&pairs)[kParts]) {
  unroll<kParts>([&](auto part) {
    const f32x16 low = upper_part(even), high = upper_part(odd);
    pairs[part] = bit_or(shift_right<16>(bits_of(low)), bits_of(high));
    even = sub(even, low), odd = sub(odd, high);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
