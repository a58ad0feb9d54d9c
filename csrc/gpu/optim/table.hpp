// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels of optimizers, the same text for host and device. They hold the tensors of a step, so
// that nothing is allocated or copied for them and a CUDA graph keeps them.
#pragma once

#include "formats/state_format.hpp"
#include "ops/optim_tensor.hpp"

namespace lowbit::gpu {

constexpr int kStepThreads = 256;
constexpr int64_t kTaskElements = 1 << 13;  // of one CTA
constexpr int kMaxConstantBytes = 128;     // Constants of any rule

// Consecutive elements a thread: 8 bytes of codes of 8 bits, 32 of float32. 8 threads or more share a scale, and a
// block lies in one CTA.
constexpr int elements_each(int64_t block) {
  return static_cast<int>(block < 64 ? block / 8 : block > 8 * kStepThreads ? block / kStepThreads : 8);
}

// Options of all tensors of a step.
struct StepOptions {
  Hyper hyper;
  const float* grad_scale;
  const float* found_inf;
  uint64_t seed;
  int64_t block_size;  // also of formats without scales: random numbers are drawn by block
  bool stochastic_rounding;
};

struct StepTable : StepOptions {
  static constexpr int kMaxTensors = 320;  // 30 KB; arguments may have 32,764 bytes from CUDA 12.1 on

  int count;
  void* constants;                 // of each tensor: kMaxConstantBytes are enough
  int32_t position[kMaxTensors];  // in the list of the call
  int32_t first_task[kMaxTensors + 1];
  OptimTensor tensor[kMaxTensors];
};
static_assert(sizeof(StepTable) <= 32764);

// The same for a kernel of which that many CTAs fit on a multiprocessor of CUDA.
template <int kCount>
struct StepTableOf : StepTable {
  static constexpr int kCtas = kCount;
};

struct ConvertArgs {  // of encode_state and decode_state
  float* values;
  uint8_t* codes;
  float* scale;
  int64_t numel;
};

}  // namespace lowbit::gpu
