// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 32
#include "level_zero/linear/activations.hpp"

#define LOWBIT_ACTIVATIONS(name, ...) \
  LOWBIT_KERNEL(name, lowbit::gpu::kLinearThreads, lowbit::gpu::LinearCall) { __VA_ARGS__(args); }
LOWBIT_ACTIVATIONS(order_1, lowbit::gpu::order_floats<1, false, true>)
LOWBIT_ACTIVATIONS(order_2, lowbit::gpu::order_floats<2, false, true>)
LOWBIT_ACTIVATIONS(order_3, lowbit::gpu::order_floats<3, false, true>)
LOWBIT_ACTIVATIONS(code_rows, lowbit::level_zero::code_rows<false>)
LOWBIT_ACTIVATIONS(code_groups, lowbit::level_zero::code_rows<true>)
LOWBIT_ACTIVATIONS(widen_rows, lowbit::level_zero::widen_rows)
LOWBIT_ACTIVATIONS(sum_rows, lowbit::level_zero::sum_rows)
