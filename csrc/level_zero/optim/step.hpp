// SPDX-License-Identifier: Apache-2.0
// optim_step with the update of csrc/gpu: a work-group is a CTA, a sub-group of 16 a warp.
#pragma once

#define LOWBIT_LANES 16
#include "gpu/optim/step.cuh"
#include "level_zero/optim/call.hpp"

namespace lowbit::level_zero {

template <class Rule, StateFormat kFormat>
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
  gpu::update_task<Rule, kFormat, block_of(kFormat), kEach>(of.tensor, of.constants,
                                                             (task - of.first_task) * gpu::kTaskElements);
}

}  // namespace lowbit::level_zero

// A driver compiles whole modules: that of a state format has one kernel per rule, <rule>, with the common number of
// moments, and optim_step_others has the rest.
#define LOWBIT_USUAL_STEP(name, Rule, format)                                                               \
  LOWBIT_KERNEL(name, lowbit::gpu::kStepThreads, lowbit::level_zero::StepCall) {                           \
    using Step = lowbit::Rule::Step<lowbit::level_zero::kUsualMoments<lowbit::Rule>>;                       \
    lowbit::level_zero::step<Step, lowbit::StateFormat::format>(args);                                      \
  }
