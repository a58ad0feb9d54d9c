// SPDX-License-Identifier: Apache-2.0
// A score program in the form that the machine runs: steps in stages, one stage per rate. First the values of a head,
// of rows, columns and diagonals of the tile; then the tile, strip by strip; then (gradients) the steps that need sums
// over the tile. A step reads and writes registers: a register has one value per row (column, diagonal) of the tile, or
// per score of one strip.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "score/graph.hpp"

namespace lowbit {

enum class Stage : uint8_t {
  head,
  row,
  column,
  diagonal,
  tile,
  row_after,
  column_after,
  diagonal_after,
  head_after,
  count
};
inline constexpr int kStages = static_cast<int>(Stage::count);

// Not registers but memory of the caller: raw scores, and the gradient of the modified ones.
inline constexpr int kScoreMemory = -1, kGradientMemory = -2;

struct ScoreOperand {
  Rate rate = Rate::constant;
  int32_t at = 0;  // index among the registers of its rate
};

struct ScoreStep {
  static constexpr int32_t kNotLinear = INT32_MIN;
  int16_t op = 0;
  char type = 'f';
  uint8_t operand_count = 0;
  ScoreOperand out;
  std::array<ScoreOperand, kMaxOperands> operands{};
  // gather, scatter_add: increment of the index from one element to the next, or kNotLinear.
  std::array<int32_t, kMaxOperands> along{};
  std::array<int32_t, kMaxOperands> down{};   // and from one row to the next
  int64_t immediate = 0;                      // gather, scatter_add: captured tensor
};

struct ScoreConstant {
  char type;
  int64_t bits;  // bits of a double; or the value
};

struct ScorePlan {
  std::vector<ScoreStep> steps;
  std::array<int, kStages + 1> begin{};  // stage s is steps[begin[s]] .. steps[begin[s + 1]]
  std::array<int, 6> registers{};        // number per rate
  std::vector<ScoreConstant> constants;

  bool empty() const { return steps.empty(); }
  bool has(Stage stage) const { return begin[static_cast<int>(stage)] < begin[static_cast<int>(stage) + 1]; }
};

// Steps that compute `output` into `memory` (and every one of `scatters`); none if the memory has the output already.
// Not fused: every step is rounded, as intervals (ops/block_classes.hpp) assume for masks.
ScorePlan score_plan(const ScoreGraph& graph, int output, int memory, std::span<const int> scatters = {},
                     bool fused = true);

// The steps of a plan, one per line.
std::string plan_text(const ScorePlan& plan);

}  // namespace lowbit
