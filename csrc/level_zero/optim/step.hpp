// SPDX-License-Identifier: Apache-2.0
// optim_step by the update of CUDA: a work-group is a CTA, a sub-group of 16 a warp.
#pragma once

#define LOWBIT_LANES 16
#include "cuda/optim/step.cuh"
#include "level_zero/optim/call.hpp"

namespace lowbit::level_zero {

template <class Rule, StateFormat kFormat, int kBlock>
LOWBIT_INLINE void step(const StepCall& call) {
  const auto* entries = static_cast<const StepEntry<Rule>*>(call.entries);
  const int64_t task = blockIdx.x;
  int found = 0, end = call.count;
  while (end - found > 1) {
    const int middle = (found + end) / 2;
    if (entries[middle].first_task <= task) found = middle;
    else end = middle;
  }
  const StepEntry<Rule>& of = entries[found];
  cuda::update_task<Rule, kFormat, kBlock, kEach>(of.tensor, of.constants,
                                                  (task - of.first_task) * cuda::kTaskElements);
}

}  // namespace lowbit::level_zero

// Of a format: <rule>_<moments>, of those that are used most.
#define LOWBIT_STEP(name, Rule, format, block)                                        \
  LOWBIT_KERNEL(name, lowbit::cuda::kStepThreads, lowbit::level_zero::StepCall) {     \
    lowbit::level_zero::step<lowbit::Rule, lowbit::StateFormat::format, block>(args); \
  }
#define LOWBIT_STEPS(format, block)                   \
  LOWBIT_STEP(adamw_2, AdamW::Step<2>, format, block) \
  LOWBIT_STEP(sgd_1, Sgd::Step<1>, format, block)     \
  LOWBIT_STEP(lion_1, Lion::Step<1>, format, block)
