// SPDX-License-Identifier: Apache-2.0
#include "level_zero/optim/step.hpp"

LOWBIT_STEPS(float8, lowbit::level_zero::kCodesBlock)
