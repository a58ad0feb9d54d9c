// SPDX-License-Identifier: Apache-2.0
// What a score_mod or a mask_mod does to one score, as data: a list of integers that a kernel runs inside its tile loop. docs/ops/attention.md
// explains the list; python/lowbit/attention/program.py writes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "ops/score_plan.hpp"

namespace lowbit {

struct ScoreProgram {
  bool is_mask = false;     // the result is a bool: keep the score or make it -inf
  ScoreGraph graph;         // with diagonals
  int output = 0;
  ScorePlan forward;        // score memory: raw in, modified (or masked) out
  ScorePlan backward;       // gradient memory: of the modified scores in, of the raw ones out; adds to the gradients of captured tensors
  ScorePlan backward_only;  // the same without captured tensors
};

// Parses, checks and plans; the last programs are kept. ValueError says what is wrong and where.
LOWBIT_API std::shared_ptr<const ScoreProgram> score_program(std::span<const int64_t> code);

// Where a gather met an index that its tensor does not have, or a division a zero. Kernels do not throw: the first one is noted here.
struct ScoreFault {
  static constexpr int kDivision = -1;  // in place of a tensor: an int was divided by zero
  std::atomic<bool> seen{false};
  int tensor = 0, dim = 0;
  int64_t index = 0;
};

// A program with its captured tensors, for one call: checked here, read by the kernels.
struct LOWBIT_API ScoreCall {

  // `op` and `argument` name the call in errors: "flex_attention", "score_mod".
  ScoreCall(std::string_view op, std::string_view argument, std::span<const int64_t> code, std::vector<TensorView> captured);

  const ScoreProgram& program() const { return *program_; }
  const TensorView* captured() const { return captured_.data(); }
  int captured_count() const { return static_cast<int>(captured_.size()); }
  ScoreFault& fault() const { return fault_; }
  void check_fault() const;  // after the kernel: IndexError if a gather was out of range

 private:
  std::string op_, argument_;
  std::shared_ptr<const ScoreProgram> program_;
  std::vector<TensorView> captured_;
  mutable ScoreFault fault_;
};

// A tile of scores: row r, column c at scores[r * stride + c] belongs to query q0 + r and key k0 + c. Every row can be read and written up to
// column round_up(cols, 16); what lies behind cols is unspecified afterwards.
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

// The row of this op runs one program over one tile: what the tests call, and what block classes are decided by.
struct ScoreProgramArgs {
  Place place{};
  const ScoreCall* call = nullptr;
  DType dtype = DType::float32;  // float32 or float64, of scores and gradient
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
  int64_t stride = 0;            // of scores and of gradient
  void* scores = nullptr;        // forward: in place; backward: raw scores, read
  void* gradient = nullptr;      // backward: of the modified scores in, of the raw ones out; else null
  const CapturedGradient* captured_gradients = nullptr;  // backward: per captured tensor
};

// Runs the program over rows x cols scores [rows, cols] (contiguous).
LOWBIT_API void score_program_eval(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores);
// gradient [rows, cols] in place; captured_gradients[i] has the shape of captured tensor i and the dtype of scores, contiguous, or is not given.
LOWBIT_API void score_program_backward(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores,
                                       const TensorView& gradient, std::span<const TensorView> captured_gradients);

}  // namespace lowbit
