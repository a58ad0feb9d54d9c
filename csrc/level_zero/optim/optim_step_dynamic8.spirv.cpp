// SPDX-License-Identifier: Apache-2.0
#include "level_zero/optim/step.hpp"

LOWBIT_STEPS(dynamic8, lowbit::level_zero::kCodesBlock)
