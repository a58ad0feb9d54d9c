// SPDX-License-Identifier: Apache-2.0
// One tensor of an optimizer's step, as kernels get it: plain addresses, so that a device can be handed a table.
#pragma once

#include "core/dtype.hpp"
#include "rules/list.hpp"

namespace lowbit {

struct OptimTensor {
  void* param;
  void* grad;
  DType param_dtype, grad_dtype;
  void* moment[kMaxMoments];
  float* scale[kMaxMoments];  // one per block; null in float formats
  int64_t numel;
  float* step_count;  // counted up by the row
};

}  // namespace lowbit
