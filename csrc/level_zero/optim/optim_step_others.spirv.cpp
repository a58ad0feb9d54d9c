// SPDX-License-Identifier: Apache-2.0
// Uncommon steps, <rule>_<moments>_<format>: AdamW with amsgrad, and SGD without momentum, which has no states and so
// only the format float32. tools/spirv removes the kernels that are empty.
#include "level_zero/optim/step.hpp"

namespace lowbit::level_zero {

template <class Rule, int kCount, StateFormat kFormat>
LOWBIT_INLINE void other_step(const StepCall& call) {
  constexpr bool kHasCount = kCount >= moments_of<Rule>(Hyper{}) && kCount <= kMaxMomentsOf<Rule>;
  if constexpr (kHasCount && kCount != kUsualMoments<Rule> && (kCount > 0 || kFormat == StateFormat::float32))
    step<typename Rule::template Step<kCount>, kFormat>(call);
}

#define LOWBIT_STEP(name, Rule, count, format)                                     \
  LOWBIT_KERNEL(name##_##count##_##format, gpu::kStepThreads, StepCall) {         \
    other_step<Rule, count, StateFormat::format>(args);                            \
  }
#define LOWBIT_STEPS(name, Rule, count)                                                       \
  LOWBIT_STEP(name, Rule, count, float32) LOWBIT_STEP(name, Rule, count, bfloat16)            \
  LOWBIT_STEP(name, Rule, count, dynamic8) LOWBIT_STEP(name, Rule, count, dynamic4)           \
  LOWBIT_STEP(name, Rule, count, float8)
static_assert(std::size(kStateFormatNames) == 5 && kMaxMoments == 3, "the lists above and below have them all");
#define LOWBIT_RULE(name, Rule)                                       \
  LOWBIT_STEPS(name, Rule, 0) LOWBIT_STEPS(name, Rule, 1)             \
  LOWBIT_STEPS(name, Rule, 2) LOWBIT_STEPS(name, Rule, 3)
LOWBIT_RULES(LOWBIT_RULE)

}  // namespace lowbit::level_zero
