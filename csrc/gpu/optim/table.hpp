// SPDX-License-Identifier: Apache-2.0
// Arguments of the optimizer kernels: the same text for host and device. They contain the tensors of a step, so that
// nothing is allocated or copied for them, and a CUDA graph stores them.
#pragma once

#include "formats/state_format.hpp"
#include "ops/optim_tensor.hpp"

namespace lowbit::gpu {

constexpr int kStepThreads = 256;
constexpr int64_t kTaskElements = 1 << 13;  // elements per CTA
constexpr int kMaxConstantBytes = 128;     // size bound of any rule's Constants

// Consecutive elements per thread: 8 bytes of 8-bit codes, 32 of float32. At least 8 threads share a scale, and a block
// is within one CTA.
constexpr int elements_each(int64_t block) {
  return static_cast<int>(block < 64 ? block / 8 : block > 8 * kStepThreads ? block / kStepThreads : 8);
}

// Options for all tensors of a step.
struct StepOptions {
  Hyper hyper;
  const float* grad_scale;
  const float* found_inf;
  uint64_t seed;
  int64_t block_size;  // used by formats without scales too: random numbers are drawn per block
  bool stochastic_rounding;
};

struct StepTable : StepOptions {
  static constexpr int kMaxTensors = 320;  // 30 KB; arguments may have 32,764 bytes from CUDA 12.1 on

  int count;
  void* constants;                 // one per tensor, kMaxConstantBytes each
  int32_t position[kMaxTensors];  // index in the list of the call
  int32_t first_task[kMaxTensors + 1];
  OptimTensor tensor[kMaxTensors];
};
static_assert(sizeof(StepTable) <= 32764);

// The same for a kernel with that many CTAs per multiprocessor (CUDA).
template <int kCount>
struct StepTableOf : StepTable {
  static constexpr int kCtas = kCount;
};

struct ConvertArgs {  // arguments of encode_state and decode_state
  float* values;
  uint8_t* codes;
  float* scale;
  int64_t numel;
};

}  // namespace lowbit::gpu
