// SPDX-License-Identifier: Apache-2.0
// score_program: one program over one tile of scores; what the tests call, and what block classes are decided by.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "score/program.hpp"

namespace lowbit {

// A tile of scores: row r, column c at scores[r * stride + c] belongs to query q0 + r and key k0 + c. Every row can be
// read and written up to column round_up(cols, 16); what lies behind cols is unspecified afterwards.
template <class T>
struct ScoreTile {
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
  T* scores = nullptr;
  int64_t stride = 0;
};

// Where the gradient of a captured tensor is added up: contiguous, of T or (wide) of double. No data: not wanted.
struct CapturedGradient {
  void* data = nullptr;
  bool wide = false;
};

struct ScoreProgramArgs {
  Place place{};
  const ScoreCall* call = nullptr;
  DType dtype = DType::float32;  // float32 or float64, of scores and gradient
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
  int64_t stride = 0;            // of the rows of scores and of gradient, at least cols
  void* scores = nullptr;        // forward: in place; backward: raw scores, read
  void* gradient = nullptr;      // backward: of the modified scores in, of the raw ones out; else null
  const CapturedGradient* captured_gradients = nullptr;  // backward: per captured tensor
};

// Runs the program over rows x cols scores [rows, cols] (contiguous).
LOWBIT_API void score_program_eval(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0,
                                   const TensorView& scores);
// gradient [rows, cols] in place; captured_gradients[i] has the shape of captured tensor i and the dtype of scores,
// contiguous, or is not given.
LOWBIT_API void score_program_backward(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0,
                                       const TensorView& scores, const TensorView& gradient,
                                       std::span<const TensorView> captured_gradients);

LOWBIT_API Call describe(const ScoreProgramArgs& args);

}  // namespace lowbit
