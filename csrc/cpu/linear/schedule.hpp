// SPDX-License-Identifier: Apache-2.0
// How a call is cut: how many threads, and how many panels one task takes.
#pragma once

#include "core/parallel.hpp"
#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int threads_for_products(int64_t m, const WeightSpec& spec) {
  return threads_worth(m * spec.n * spec.k);
}

// To prepare an activation takes as long as eight products: AVX2 quantizes about 4 per ns.
LOWBIT_INLINE int threads_for(int64_t activations) { return threads_worth(8 * activations); }

// Panels of a task: a multiple of those that are multiplied at a time, at most max. A thread has at least `tasks`, so
// that one slow thread costs little.
struct PanelCut {
  int64_t at_once, max = 8, tasks = 8;
  // Panels per task, of as many as all blocks of rows of a call have together.
  LOWBIT_INLINE int64_t chunk(int64_t panels, int threads) const {
    return round_up(larger(1, smaller(max, panels / (threads * tasks))), at_once);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
