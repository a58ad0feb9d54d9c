// SPDX-License-Identifier: Apache-2.0
// Codes of 4 bits as files store them, two in a byte, in the tiles of the kernels' layout.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/codec.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A tile's 64 codes of a column, from two runs of 32 of 16 bytes each. Byte k of the 32 that the column has in the tile
// holds codes k and k + 32. kHalves: the low nibbles of a run are its first half; else two neighbours share a byte.
template <bool kHalves>
LOWBIT_INLINE void write_nibbles(const uint8_t* first, const uint8_t* second, uint8_t* tile, int64_t column) {
  static_assert(kTileK == 64 && kPanelColumns == 16);
  alignas(16) uint8_t low[16], high[16], bytes[32];
  for (int i = 0; i < 16; i++) {
    low[i] = static_cast<uint8_t>((first[i] & 15) | second[i] << 4);
    high[i] = static_cast<uint8_t>(first[i] >> 4 | (second[i] & 240));
  }
  for (int i = 0; i < 16; i++)
    bytes[kHalves ? i : 2 * i] = low[i], bytes[kHalves ? i + 16 : 2 * i + 1] = high[i];
  for (int64_t row = 0; row < 8; row++)
    std::memcpy(tile + row * NibbleTile::unit_bytes + column * 4, bytes + row * 4, 4);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
