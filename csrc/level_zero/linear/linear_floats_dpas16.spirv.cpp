// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/linear/many_rows.hpp"

LOWBIT_LINEAR(linear_1, linear<false, 1>)
LOWBIT_LINEAR(linear_8, linear<false, 8>)
LOWBIT_LINEAR(linear_many, linear_of_many<false>)
