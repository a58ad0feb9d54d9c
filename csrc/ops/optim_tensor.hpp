// SPDX-License-Identifier: Apache-2.0
// One tensor of an optimizer step, in the form kernels take: plain addresses, for tables that a device reads.
#pragma once

#include "core/dtype.hpp"
#include "rules/list.hpp"

namespace lowbit {

struct OptimTensor {
  void* param;
  void* grad;
  DType param_dtype, grad_dtype;
  void* moment[kMaxMoments];
  float* scale[kMaxMoments];  // one scale per block; null for float formats
  int64_t numel;
  float* step_count;  // incremented by the row
};

}  // namespace lowbit
