// SPDX-License-Identifier: Apache-2.0
// score_program: one program over one tile of scores. block_classes is computed with it.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "score/program.hpp"

namespace lowbit {

// Accumulator of a captured tensor's gradient: contiguous, of T or (wide) of double. No data: not wanted.
struct CapturedGradient {
  void* data = nullptr;
  bool wide = false;
};

struct ScoreProgramArgs {
  Place place{};
  const ScoreCall* call = nullptr;
  DType dtype = DType::float32;  // float32 or float64: dtype of scores and gradient
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
  int64_t stride = 0;            // row stride of scores and gradient, at least cols
  void* scores = nullptr;        // forward: updated in place; backward: raw scores, read
  void* gradient = nullptr;      // backward: gradient of the modified scores in, of the raw ones out; else null
  const CapturedGradient* captured_gradients = nullptr;  // backward: one per captured tensor
};

LOWBIT_API Call describe(const ScoreProgramArgs& args);

}  // namespace lowbit
