// SPDX-License-Identifier: Apache-2.0
// How work is cut: sizes in bytes of what should stay in a cache, and how many panels one task takes.
#pragma once

#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kL2Block = 256 << 10;  // half of the smallest L2 that we care about (512 KiB, Zen 2 and 3)
constexpr int64_t kL1Block = 16 << 10;   // half of a 32 KiB L1

// At least eight tasks a thread, so that one slow thread costs little; at most eight panels a task; a multiple of the tile.
LOWBIT_INLINE int64_t panel_chunk(int64_t panels, int64_t threads, int64_t tile) {
  const int64_t wanted = larger(1, smaller(8, panels / (threads * 8)));
  return round_up(wanted, tile);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
