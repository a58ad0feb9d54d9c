// SPDX-License-Identifier: Apache-2.0
// The peak rate of the tile unit on bytes: two activation tiles times two weight tiles, which stay loaded.
#include LOWBIT_ISA_HEADER

#include "cpu/loops.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

int64_t run_tiles(int64_t rounds) {
  alignas(64) const int8_t zeros[TileUnit::kRows * 64] = {};
  const TileUnit unit(64);
  TileUnit::before_loads();
  unroll<4>([&](auto tile) __attribute__((always_inline)) {
    TileUnit::zero<tile>();
    TileUnit::load<TileUnit::kActivations + tile>(zeros, 64);
  });
  for (int64_t round = 0; round < rounds; round++)
    unroll<4>([&](auto tile) __attribute__((always_inline)) {
      TileUnit::add_products<int32_t, tile, TileUnit::kActivations + tile % 2, TileUnit::kWeights + tile / 2>();
    });
  return rounds * 4 * 16 * 16 * 64 * 2;
}

constexpr Peak kTiles{Arithmetic::integer, LOWBIT_ROW("int8 products"), run_tiles};

}  // namespace

void peak_tiles_rows(Backend& backend) { add_peak(backend, kTiles); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
