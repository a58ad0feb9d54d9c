// SPDX-License-Identifier: Apache-2.0
// Which tiles there are: a dimension is cut into tiles that never cross a block of the block mask, so that a tile is empty, partial or full.
#pragma once

#include "cpu/attention/softmax.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Tiling {
  int64_t length, block, tile, per_block, count;
  LOWBIT_INLINE Tiling(int64_t length, int64_t block_size, int64_t tile_size)
      : length(length), block(block_size ? block_size : larger(1, length)), tile(smaller(tile_size, block)),
        per_block(ceil_div(block, tile)), count(length / block * per_block + ceil_div(length % block, tile)) {}
  LOWBIT_INLINE int64_t block_of(int64_t i) const { return i / per_block; }
  LOWBIT_INLINE int64_t begin(int64_t i) const { return block_of(i) * block + i % per_block * tile; }
  LOWBIT_INLINE int size(int64_t i) const {
    const int64_t end = smaller(length, (block_of(i) + 1) * block);
    return static_cast<int>(smaller(tile, end - begin(i)));
  }
};

struct Tilings {
  Tiling q, kv;
  LOWBIT_INLINE Tilings(const AttentionForwardArgs& args, int64_t q_tile, int64_t kv_tile)
      : q(args.q_length(), args.blocks.classes ? args.blocks.q_block : 0, q_tile),
        kv(args.kv_length(), args.blocks.classes ? args.blocks.kv_block : 0, kv_tile) {}

  // False if nothing of the tile is visible.
  LOWBIT_INLINE bool visit(const AttentionForwardArgs& args, int64_t b, int64_t h, int64_t i, int64_t j, TilePlace& at) const {
    at = {b, h, q.begin(i), kv.begin(j), q.size(i), kv.size(j), args.mask_mod != nullptr};
    if (args.causal && at.k0 >= at.q0 + at.rows) return false;
    if (!args.blocks.classes) return true;
    const BlockClass block = args.blocks.row(b, h, q.block_of(i))[kv.block_of(j)];
    at.partial = block == BlockClass::partial;
    return block != BlockClass::empty;
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
