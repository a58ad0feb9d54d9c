// SPDX-License-Identifier: Apache-2.0
// How a linear call is cut: how many threads, and how many panels one task takes.
#pragma once

#include "core/parallel.hpp"
#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int threads_for_products(int64_t m, const WeightSpec& spec) {
  return threads_worth(m * spec.n * spec.k);
}

// At least eight tasks a thread, so that one slow thread costs little; at most eight panels a task; a multiple
// of the tile.
LOWBIT_INLINE int64_t panel_chunk(int64_t panels, int64_t threads, int64_t tile) {
  const int64_t wanted = larger(1, smaller(8, panels / (threads * 8)));
  return round_up(wanted, tile);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
