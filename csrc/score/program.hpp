// SPDX-License-Identifier: Apache-2.0
// A score_mod or a mask_mod as data: a list of integers that a kernel runs for each score, inside its tile loop.
// docs/ops/score_programs.md explains the list; python/lowbit/score/program.py writes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.hpp"
#include "core/tensor_view.hpp"
#include "score/plan.hpp"

namespace lowbit {

struct ScoreProgram {
  bool is_mask = false;     // the result is a bool: keep the score or make it -inf
  ScoreGraph graph;         // with diagonals
  int output = 0;
  ScorePlan forward;        // score memory: raw in, modified (or masked) out
  ScorePlan backward;  // gradient memory: of the modified scores in, of the raw ones out; adds to the gradients of
                       // captured tensors
  ScorePlan backward_only;  // the same without captured tensors
};

// Parses, checks and plans; recent programs are cached. ValueError says what is wrong and where.
LOWBIT_API std::shared_ptr<const ScoreProgram> score_program(std::span<const int64_t> code);

// A gather with an index out of its tensor's range, or a division by zero. Kernels do not throw: the first fault is
// recorded here.
struct ScoreFault {
  static constexpr int kDivision = -1;  // replaces the index of a tensor: an int was divided by zero
  std::atomic<bool> seen{false};
  int tensor = 0, dim = 0;
  int64_t index = 0;
};

// A program with its captured tensors, for one call: checked here, read by the kernels.
struct LOWBIT_API ScoreCall {

  // `op` and `argument` name the call in errors: "flex_attention", "score_mod".
  ScoreCall(std::string_view op, std::string_view argument, std::span<const int64_t> code,
            std::vector<TensorView> captured);

  const ScoreProgram& program() const { return *program_; }
  const TensorView* captured() const { return captured_.data(); }
  int captured_count() const { return static_cast<int>(captured_.size()); }
  ScoreFault& fault() const { return fault_; }
  // Checks by the row that runs the program, which may read memory: before, that integers fit 32 bits; after, that no
  // gather was out of range.
  void check_captured() const;
  void check_fault() const;

 private:
  std::string op_, argument_;
  std::shared_ptr<const ScoreProgram> program_;
  std::vector<TensorView> captured_;
  mutable ScoreFault fault_;
  mutable std::atomic<bool> captured_checked_{false};  // a call may run its program over many tiles
};

}  // namespace lowbit
