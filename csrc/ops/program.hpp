// SPDX-License-Identifier: Apache-2.0
// run_program: steps of a model, each a call of another op (rms_norm, linear, rope_append, attention), in one call. One
// token's weights push Python out of the caches: 30 layers of 576 columns took 4.6 ms in kernels and 4.4 in Python.
//
// A program is a list of integers: its version, then for each step the number of its kind, the number of fields that
// follow, and these (program_code.hpp). A later version of a step has more fields behind those of today, each with
// a default, so that an old program stays readable; a program with fields that are not known here is refused.
//
// A step reads and writes operands: constants (weights), states (caches, which are written), inputs (of this call), and
// results of steps before. Three objects, each made of the one before, none changed after it was made:
//   Program: the steps, checked as far as numbers allow                      made of the integers
//   ProgramPlan: the arguments of each step but for addresses, and the place of each result in memory, a function of
//     the shapes of inputs and constants; it may serve many runs, by several threads at a time
//   ProgramRun: the addresses of one call; whatever grows with the cache is checked here, before the first step runs
#pragma once

#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "ops/attention.hpp"
#include "ops/linear.hpp"
#include "ops/rms_norm.hpp"
#include "ops/rope_append.hpp"

namespace lowbit {

class AttentionMods;

struct Operand {
  enum class Kind : int8_t { constant, state, input, result, none };
  Kind kind = Kind::none;
  int32_t index = 0;

  explicit operator bool() const { return kind != Kind::none; }
};

// Each step but ScoreModStep makes one result; a LinearStep with `into` writes to the result of another.
struct ScoreModStep {  // makes a score_mod for attention
  std::shared_ptr<const AttentionMods> mods;
};
struct ColumnsStep {  // a result [..., columns] with the rows of x, which others write
  Operand x;
  int64_t columns = 0;
};
struct RmsNormStep {
  Operand x, weight, add;
  double eps = 0, offset = 0;
};
struct LinearStep {
  Operand x, weight, bias, mul, add;
  WeightSpec spec;
  int64_t x_format = 0, activation = 0;
  int64_t row = 0;            // that it prefers (ops/preferred_row.hpp)
  Operand into;               // y is the columns from `first_column` on of this result, which has one row
  int64_t first_column = 0;
};
struct RopeAppendStep {
  Operand qkv, cos, sin, q_weight, k_weight;  // qkv [B, L, (Hq + 2 Hkv) E], E that of keys
  Operand keys, values;       // states [B, Hkv, S, E]
  int64_t start = 0;          // index of the number of tokens in this cache
  double eps = 0, offset = 0;
};
struct AttentionStep {        // of the tokens in the cache and the new ones; result [B, L, Hq Ev]
  Operand q, keys, values, mask, sink;
  int64_t start = 0;
  double scale = 1;
  bool causal = false;        // where the mask is not given
  int64_t score = -1;         // index of a ScoreModStep among those, or -1
};
using ProgramStep = std::variant<ScoreModStep, ColumnsStep, RmsNormStep, LinearStep, RopeAppendStep, AttentionStep>;

class Program {
 public:
  LOWBIT_API explicit Program(std::span<const int64_t> code);

  std::vector<ProgramStep> steps;
  std::vector<int32_t> result_of;           // step -> its result, the last one for steps without one of their own
  std::vector<int32_t> last_use;            // result -> the last step that reads or writes it
  std::vector<const AttentionMods*> scores;
  std::vector<int32_t> shaping_inputs;      // those whose shape decides that of a result
  int32_t constants = 0, states = 0, inputs = 0, starts = 0;  // that the steps name
};

// The tensors of a call. An input of shape [0] is not given; only a mask may be missing.
struct ProgramTensors {
  std::span<const TensorView> constants, states, inputs;
  std::span<const int64_t> starts;  // tokens that each kind of cache has
};

class ProgramPlan {
 public:
  // Checks every step: nothing is written where one is wrong.
  LOWBIT_API ProgramPlan(std::shared_ptr<const Program> program, const ProgramTensors& tensors);

  // Whether it is the plan of these tensors too; theirs may have other addresses, caches and masks other sizes.
  LOWBIT_API bool serves(const ProgramTensors& tensors) const;
  LOWBIT_API void run(const ProgramTensors& tensors, char* memory, void* y) const;

  const TensorView& y() const { return results_.back().view; }  // of the last step, without data
  int64_t bytes() const { return bytes_; }                      // of memory between the steps

 private:
  friend class ProgramRun;
  struct Result {
    TensorView view;
    int64_t offset = 0;
  };
  void place_results();

  std::shared_ptr<const Program> program_;
  std::vector<Result> results_;
  // Of a step whose arguments are those of every run but for addresses.
  std::vector<std::variant<std::monostate, RmsNormArgs, LinearArgs>> fixed_;
  std::vector<TensorView> constants_, inputs_;  // without data
  Place place_;
  int64_t bytes_ = 0;
};

}  // namespace lowbit
