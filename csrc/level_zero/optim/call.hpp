// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels of optimizers, the same text for host and device. Constants are made by the host: they
// are computed in double, which many of these GPUs lack.
#pragma once

#include "gpu/optim/constants.hpp"

namespace lowbit::level_zero {

constexpr int kEach = 4;  // elements a thread: a module of 8 is twice as long

// Elements that share a scale. Those of formats without scales are dealt out as in blocks of 256.
LOWBIT_INLINE constexpr int block_of(StateFormat format) {
  switch (format) {
    case StateFormat::float32: case StateFormat::bfloat16: case StateFormat::dynamic8: case StateFormat::float8:
      return 256;
    case StateFormat::dynamic4: return 128;
  }
  __builtin_unreachable();
}

// Moments that a rule has with the numbers that are used most: SGD its momentum, AdamW no amsgrad.
template <class Rule>
constexpr int kUsualMoments = static_cast<int>(larger(moments_of<Rule>(Hyper{}), 1));

template <class Rule>
struct StepEntry {
  OptimTensor tensor;
  int64_t first_task;
  gpu::Constants<Rule> constants;
};

struct StepCall {
  const void* entries;  // StepEntry of each tensor
  int32_t count;
};

}  // namespace lowbit::level_zero
