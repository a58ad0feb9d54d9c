// SPDX-License-Identifier: Apache-2.0
// Arguments of the optimizer kernels: the same text for host and device. The host computes the constants, in double,
// which many of these GPUs lack.
#pragma once

#include "gpu/optim/constants.hpp"

namespace lowbit::level_zero {

constexpr int kEach = 4;  // elements per thread: a module with 8 is twice as large

// Elements that share a scale. For formats without scales, elements are assigned as in blocks of 256.
LOWBIT_INLINE constexpr int block_of(StateFormat format) {
  switch (format) {
    case StateFormat::float32: case StateFormat::bfloat16: case StateFormat::dynamic8: case StateFormat::float8:
      return 256;
    case StateFormat::dynamic4: return 128;
  }
  __builtin_unreachable();
}

// Moments of a rule with common hyperparameters: SGD has momentum, AdamW no amsgrad.
template <class Rule>
constexpr int kUsualMoments = static_cast<int>(larger(moments_of<Rule>(Hyper{}), 1));

template <class Rule>
struct StepEntry {
  OptimTensor tensor;
  int64_t first_task;
  gpu::Constants<Rule> constants;
};

struct StepCall {
  const void* entries;  // one StepEntry per tensor
  int32_t count;
};

}  // namespace lowbit::level_zero
