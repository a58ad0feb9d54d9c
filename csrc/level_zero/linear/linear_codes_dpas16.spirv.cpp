// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/linear/many_rows.hpp"

LOWBIT_KERNEL(linear_1, lowbit::level_zero::kTeamThreads, lowbit::cuda::LinearCall) { lowbit::level_zero::linear<true, 1>(args); }
LOWBIT_KERNEL(linear_8, lowbit::level_zero::kTeamThreads, lowbit::cuda::LinearCall) { lowbit::level_zero::linear<true, 8>(args); }
LOWBIT_KERNEL(linear_many, lowbit::level_zero::kTeamThreads, lowbit::cuda::LinearCall) { lowbit::level_zero::linear_of_many<true>(args); }
