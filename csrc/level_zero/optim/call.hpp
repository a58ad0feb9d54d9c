// SPDX-License-Identifier: Apache-2.0
// What the kernels of optimizers get, the same text for host and device. Constants are made by the host: they are
// computed in double, which many of these GPUs lack.
#pragma once

#include "cuda/optim/constants.hpp"

namespace lowbit::level_zero {

constexpr int kCodesBlock = 256, kNibblesBlock = 128;  // elements that share a scale: of 8 bits, of 4
constexpr int kEach = 4;  // elements a thread: a module of 8 is twice as long

template <class Rule>
struct StepEntry {
  OptimTensor tensor;
  int64_t first_task;
  cuda::Constants<Rule> constants;
};

struct StepCall {
  const void* entries;  // StepEntry of each tensor
  int32_t count;
};

}  // namespace lowbit::level_zero
