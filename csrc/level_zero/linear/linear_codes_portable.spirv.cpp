// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/linear/portable.hpp"

LOWBIT_KERNEL(linear_1, lowbit::level_zero::kTeamThreads, lowbit::cuda::LinearCall) { lowbit::level_zero::linear<true, 1>(args); }
LOWBIT_KERNEL(linear_8, lowbit::level_zero::kTeamThreads, lowbit::cuda::LinearCall) { lowbit::level_zero::linear<true, 8>(args); }
