// SPDX-License-Identifier: Apache-2.0
// The tiles that a task visits: those that causality, the window, the block mask and the mask leave non-empty.
#pragma once

#include "core/parallel.hpp"
#include "cpu/attention/scores.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Threads for the two products of the forward; one, if these take less time than a parallel region.
LOWBIT_INLINE int threads_for_attention(const ForwardCall& args) {
  if (args.on_one_thread) return 1;
  const double products = static_cast<double>(args.batch() * args.heads()) * static_cast<double>(args.q_length()) *
                          static_cast<double>(args.kv_length()) * static_cast<double>(args.q.size(3) + args.ev());
  constexpr double kEnough = static_cast<double>(kSerialProducts);
  return products < kEnough ? threads_worth(static_cast<int64_t>(products)) : num_threads();
}

struct Tilings {
  Tiling q, kv;
  LOWBIT_INLINE Tilings(const ForwardCall& args, int64_t q_tile, int64_t kv_tile)
      : q(args.q_length(), args.blocks.classes ? args.blocks.q_block : 0, q_tile),
        kv(args.kv_length(), args.blocks.classes ? args.blocks.kv_block : 0, kv_tile) {}

  // Tile (i, j): false if nothing of it is visible. Rows and columns at the edges that causality or the window hide are
  // trimmed: the first rows and last columns under causality, the last rows under a window.
  LOWBIT_INLINE bool visit(const ForwardCall& args, int64_t b, int64_t h, int64_t i, int64_t j,
                           TilePosition& at) const {
    at = {b, h, q.begin(i), kv.begin(j), q.size(i), kv.size(j), 0, args.mask_mod != nullptr};
    if (args.causal) {
      const int64_t end = args.position + at.q0 + at.rows;
      if (at.k0 >= end) return false;
      at.cols = static_cast<int>(smaller(at.cols, end - at.k0));
      at.skipped = static_cast<int>(larger(0, at.k0 - args.position - at.q0));
      at.q0 += at.skipped, at.rows -= at.skipped;
    }
    if (args.window > 0) {
      const int64_t end = at.k0 + at.cols + args.window - 1 - args.position;  // end of queries that see the last column
      if (at.q0 >= end) return false;
      at.rows = static_cast<int>(smaller(at.rows, end - at.q0));
    }
    if (args.blocks.classes) {
      const BlockClass block = args.blocks.row(b, h, q.block_of(i))[kv.block_of(j)];
      at.partial = block == BlockClass::partial;
      if (block == BlockClass::empty) return false;
    }
    return !args.mask || cut_hidden(args.mask, at);
  }

 private:
  // Trims trailing columns that a mask hides from all rows; false if it hides all. Most of a static cache is hidden.
  static bool cut_hidden(const TensorView& mask, TilePosition& at) {
    const Span shown = shown_columns(mask, at, 1, {0, round_up(at.cols, 16)});
    at.cols = static_cast<int>(smaller(at.cols, shown.end));
    return shown.begin < shown.end;
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
