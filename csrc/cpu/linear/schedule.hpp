// SPDX-License-Identifier: Apache-2.0
// The division of a call: number of threads, and panels per task.
#pragma once

#include "core/parallel.hpp"
#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE int threads_for_products(int64_t m, const WeightSpec& spec) {
  return threads_worth(m * spec.n * spec.k);
}

// Preparing an activation takes as long as eight products: AVX2 quantizes about 4 per ns.
LOWBIT_INLINE int threads_for(int64_t activations) { return threads_worth(8 * activations); }

// Panels per task: a multiple of those multiplied at a time, at most max. A thread has at least `tasks` tasks, so that
// one slow thread costs little.
struct PanelCut {
  int64_t at_once, max = 8, tasks = 8;
  // Panels per task, given the total over all blocks of rows of a call.
  LOWBIT_INLINE int64_t chunk(int64_t panels, int threads) const {
    return round_up(larger(1, smaller(max, panels / (threads * tasks))), at_once);
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
