// SPDX-License-Identifier: Apache-2.0
#include "level_zero/optim/step.hpp"

#define LOWBIT_RULE(name, Rule) LOWBIT_USUAL_STEP(name, Rule, bfloat16)
LOWBIT_RULES(LOWBIT_RULE)
