// SPDX-License-Identifier: Apache-2.0
// How attention cuts queries and keys into tiles. No std: device sources include it.
#pragma once

#include "core/bits.hpp"

namespace lowbit {

// A dimension is cut into tiles that never cross a block of the block mask, so that each is empty, partial or full.
struct Tiling {
  int64_t length, block, tile, per_block, count;
  LOWBIT_INLINE Tiling(int64_t length, int64_t block_size, int64_t tile_size)
      : length(length), block(block_size   ? block_size
                              : length > 1 ? length
                                           : 1),
        tile(tile_size < block ? tile_size : block), per_block((block + tile - 1) / tile),
        count(length / block * per_block + (length % block + tile - 1) / tile) {}
  LOWBIT_INLINE int64_t block_of(int64_t i) const { return i / per_block; }
  LOWBIT_INLINE int64_t begin(int64_t i) const { return block_of(i) * block + i % per_block * tile; }
  LOWBIT_INLINE int size(int64_t i) const {
    const int64_t block_end = (block_of(i) + 1) * block, rest = (length < block_end ? length : block_end) - begin(i);
    return static_cast<int>(tile < rest ? tile : rest);
  }
};

}  // namespace lowbit
