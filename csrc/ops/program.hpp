// SPDX-License-Identifier: Apache-2.0
// run_program: a sequence of model steps, each a call of another op (linear, attention, experts,
// a norm ..), in one call. Calling them from Python costs as much time as the kernels take, since one token's weights
// evict Python from the caches: 4.4 ms beside 4.6 ms for 30 layers of 576 columns on a Xeon.
//
// A program is a list of integers: its version, then for each step its kind, the number of fields, and the fields
// (program_code.hpp). A later version may append fields to a step, each with a default, so that old programs stay
// readable; a program with fields unknown here is refused.
//
// A step reads and writes operands: constants (weights), states (caches, which are written), inputs (of this call), and
// results of earlier steps. Three immutable objects, each made from the one before:
//   Program: the steps, checked as far as possible without tensors; made from the integers
//   ProgramPlan: the arguments of each step except addresses, and the memory offset of each result, a function of
//     the shapes of inputs and constants; it may serve many runs, several threads at a time
//   ProgramRun: the addresses of one call; sizes that grow with the cache are checked here, before the first step runs
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "ops/attention.hpp"
#include "ops/experts.hpp"
#include "ops/layer_norm.hpp"
#include "ops/linear.hpp"
#include "ops/pointwise.hpp"
#include "ops/program_heads.hpp"
#include "ops/program_operand.hpp"
#include "ops/program_recurrent.hpp"
#include "ops/rms_norm.hpp"
#include "ops/rope_append.hpp"
#include "ops/route.hpp"

namespace lowbit {

class AttentionMods;

// Each step except ScoreModStep has one result, and a RouteStep has two; a LinearStep or HeadsStep with `into`, a
// MaskRowsStep and a ScaleColumnsStep write to the result of another step. Those of recurrent layers are in
// program_recurrent.hpp, those of single heads in program_heads.hpp.
struct ScoreModStep {  // a score_mod for attention
  std::shared_ptr<const AttentionMods> mods;
};
struct ColumnsStep {  // a result [..., columns] with the rows of x, written by other steps
  Operand x;
  int64_t columns = 0;
};
struct RmsNormStep {
  Operand x, weight, add;
  double eps = 0, offset = 0;
};
struct LayerNormStep {
  Operand x, weight, bias, add;
  double eps = 0, offset = 0;
};
struct PointwiseStep {
  Operand x, add, gate;
  int64_t function = 0;
  double scale = 1, positive = 0, negative = 0, linear = 0;
  std::string_view op = "pointwise";  // for errors; scaled_add is a step of another kind, with a gate and no function
  // The gate has one element for each row of x; or, of rows of x as heads of gate_size, the columns of a head are those
  // of the gate from gate_column on, which are gate_step behind those of the head before.
  int64_t gate_size = 0, gate_column = 0, gate_step = 0;
  GateFunction gate_function = GateFunction::sigmoid;  // sigmoid or silu
  std::optional<DType> result;  // none: that of x
};
struct LinearStep {
  Operand x, weight, bias, mul, add;
  WeightSpec spec;
  int64_t x_format = 0, activation = 0;
  int64_t row = 0;            // the preferred row (ops/preferred_row.hpp)
  Operand into;               // y is written to this one-row result, from column `first_column` on
  int64_t first_column = 0;
  Operand inner, up;          // an adapter (LowRank); may be absent
  std::vector<LowRank::Part> parts;
};
struct RopeAppendStep {
  Operand qkv, cos, sin, q_weight, k_weight;  // qkv [B, L, (Hq + 2 Hkv) E], E of keys, or with gated (2 Hq + 2 Hkv) E
  Operand keys, values;       // states [B, Hkv, S, E]
  int64_t start = 0;          // index into ProgramTensors::starts
  double eps = 0, offset = 0;
  int64_t rotation = 0;
  bool grouped = false, norm_behind = false, gated = false;
};
struct AttentionStep {        // attends to the tokens in the cache and the new ones; result [B, L, Hq Ev]
  Operand q, keys, values, mask, sink;  // q [B, Hq, L, E] or [B, L, Hq E]
  int64_t start = 0;
  double scale = 1;
  bool causal = false;        // if no mask is given
  int64_t score = -1;         // index among the ScoreModSteps, or -1
  Operand cu_seqlens;         // ends of packed sequences (ops/attention.hpp); may be absent, like a mask
};
struct SelfAttentionStep {    // without a cache or a rotary embedding; result [B, L, Hq E]
  Operand qkv, mask, cu_seqlens;  // qkv [B, L, (Hq + 2 Hkv) E]
  int64_t kv_heads = 0, e = 0;
  double scale = 1;
};
struct CrossAttentionStep {   // to all tokens of keys and values, which other code wrote; result [B, L, Hq Ev]
  Operand q, keys, values, mask;  // q [B, L, Hq E]; keys [B, Hkv, S, E]; values [B, Hkv, S, Ev]
  double scale = 1;
};
struct RouteStep {            // the results are weights and index [T, k], T being all rows of x
  Operand x, weight, bias, correction, expert_scale;  // without a weight, x are the logits
  bool rounds = false;
  int64_t scoring = 0;
  RouteArgs numbers;          // without tensors
};
struct ExpertsStep {          // the result has the leading dimensions of x
  Operand x, gate_up, down, index, weights, gate_up_bias, down_bias;
  WeightSpec gate_up_spec, down_spec;
  int64_t gate_up_x_format = 0, down_x_format = 0, activation = 0;
  Gate gate;
};
using ProgramStep = std::variant<ScoreModStep, ColumnsStep, RmsNormStep, LayerNormStep, PointwiseStep, LinearStep,
                                 RopeAppendStep, AttentionStep, SelfAttentionStep, CrossAttentionStep, RouteStep,
                                 ExpertsStep, MaskRowsStep, ScaleColumnsStep, CausalConv1dStep, GatedDeltaRuleStep,
                                 SsdStep, SelectiveScanStep, GatedRmsNormStep, HeadsStep, HeadLinearStep>;

class Program {
 public:
  LOWBIT_API explicit Program(std::span<const int64_t> code);

  std::vector<ProgramStep> steps;
  std::vector<int32_t> result_of;           // step -> its (last) result, or the latest one if it has none
  std::vector<int32_t> last_use;            // result -> the last step that reads or writes it
  std::vector<const AttentionMods*> scores;
  std::vector<int32_t> shaping_inputs;      // inputs whose shapes determine those of results
  int32_t constants = 0, states = 0, inputs = 0, starts = 0;  // number of each that the steps name
};

// The tensors of a call. An input of shape [0] counts as absent; only a mask or cu_seqlens may be.
struct ProgramTensors {
  std::span<const TensorView> constants, states, inputs;
  std::span<const int64_t> starts;  // number of tokens in each kind of cache
};

class ProgramPlan {
 public:
  // Checks every step: if one is invalid, nothing is written.
  LOWBIT_API ProgramPlan(std::shared_ptr<const Program> program, const ProgramTensors& tensors);

  // Whether this plan fits these tensors too: addresses and the sizes of caches and masks may differ.
  LOWBIT_API bool serves(const ProgramTensors& tensors) const;
  LOWBIT_API void run(const ProgramTensors& tensors, char* memory, void* y) const;

  const TensorView& y() const { return results_.back().view; }  // result of the last step, without data
  int64_t bytes() const { return bytes_; }                      // memory for results between steps

 private:
  friend class ProgramRun;
  struct Result {
    TensorView view;
    int64_t offset = 0;
  };
  void place_results();

  std::shared_ptr<const Program> program_;
  std::vector<Result> results_;
  // Arguments of steps that change between runs in addresses alone.
  using Fixed =
      std::variant<std::monostate, RmsNormArgs, LayerNormArgs, PointwiseArgs, LinearArgs, RouteArgs, ExpertsArgs,
                   GatherLinearArgs>;
  std::vector<Fixed> fixed_;
  std::vector<TensorView> constants_, inputs_;  // without data
  Place place_;
  int64_t bytes_ = 0;
};

}  // namespace lowbit
