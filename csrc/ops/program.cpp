// SPDX-License-Identifier: Apache-2.0
// Parses a program from integers.
#include "ops/program.hpp"

#include <bit>
#include <cmath>
#include <optional>

#include "ops/attention_mods.hpp"
#include "ops/program_code.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

// A cursor over the integers.
class Reader {
 public:
  Reader(Program& program, std::span<const int64_t> code) : program_(program), code_(code) {}

  void all() {
    check(!code_.empty() && code_[0] == kProgramVersion, value, kRunProgram, ": program must begin with its version, ",
          kProgramVersion, ", got ", code_.empty() ? "nothing" : std::to_string(code_[0]));
    for (next_ = 1; next_ < code_.size();) step();
    check(results_ > 0, value, kRunProgram, ": program must have at least one step with a result, got none");
  }

 private:
  void step() {
    check(code_.size() - next_ >= 2, value, kRunProgram, ": program must have a kind and a number of fields for step ",
          program_.steps.size(), ", got ", code_.size() - next_, " numbers");
    const int64_t kind = code_[next_], count = code_[next_ + 1];
    next_ += 2;
    check(count >= 0 && count <= static_cast<int64_t>(code_.size() - next_), value, kRunProgram, ": step ",
          program_.steps.size(), " of program must have its fields, got ", code_.size() - next_, " numbers for ",
          count);
    end_ = next_ + static_cast<std::size_t>(count);
    program_.steps.push_back(made(kind));
    check(next_ == end_, value, kRunProgram, ": step ", program_.steps.size() - 1, " of program must have ",
          static_cast<int64_t>(next_) - static_cast<int64_t>(end_) + count, " fields at the most, got ", count,
          ": a newer version of lowbit made it");
    const int own = std::visit([](const auto& step) { return count_results(step); }, program_.steps.back());
    program_.last_use.insert(program_.last_use.end(), static_cast<std::size_t>(own), at());
    results_ += own;
    program_.result_of.push_back(results_ - 1);
  }

  static int count_results(const ScoreModStep&) { return 0; }
  static int count_results(const LinearStep& step) { return step.into ? 0 : 1; }
  static int count_results(const RouteStep&) { return 2; }
  template <class Step>
  static int count_results(const Step&) { return 1; }

  ProgramStep made(int64_t kind) {
    switch (static_cast<StepKind>(kind)) {
      case StepKind::score: return score();
      case StepKind::columns: return ColumnsStep{.x = shaping("x"), .columns = at_least("columns", 1)};
      case StepKind::rms_norm: return rms_norm();
      case StepKind::linear: return linear();
      case StepKind::rope_append: return rope_append();
      case StepKind::attention: return attention();
      case StepKind::route: return route();
      case StepKind::experts: return experts();
      case StepKind::scaled_add: return scaled_add();
      case StepKind::layer_norm: return layer_norm();
      case StepKind::pointwise: return pointwise();
      case StepKind::self_attention: return self_attention();
    }
    check(false, value, kRunProgram, ": the kind of step ", at(), " of program must be known, got ", kind);
    return ScoreModStep{};
  }

  ScoreModStep score() {
    ScoreModStep step{.mods = std::make_shared<const AttentionMods>(
                       kRunProgram, ModCode{code_.subspan(next_, end_ - next_), {}}, ModCode{})};
    next_ = end_;
    program_.scores.push_back(step.mods.get());
    return step;
  }

  RmsNormStep rms_norm() {
    RmsNormStep step;
    step.x = shaping("x"), step.weight = constant("weight");
    step.eps = real(), step.offset = real(), step.add = optional_operand("add");
    return step;
  }

  LayerNormStep layer_norm() {
    LayerNormStep step;
    step.x = shaping("x"), step.weight = optional_constant("weight"), step.bias = optional_constant("bias");
    step.eps = real(), step.offset = real(0), step.add = optional_operand("add");
    return step;
  }

  PointwiseStep pointwise() {
    PointwiseStep step;
    step.x = shaping("x"), step.function = number(0), step.scale = real(1), step.add = optional_operand("add");
    step.positive = real(0), step.negative = real(0), step.linear = real(0);
    return step;
  }

  LinearStep linear() {
    LinearStep step;
    step.x = shaping("x"), step.weight = constant("weight");
    step.spec = spec();
    step.x_format = number();
    step.bias = optional_constant("bias");
    step.activation = number(0);
    step.mul = optional_operand("mul"), step.add = optional_operand("add");
    step.row = number(0);
    step.into = optional_operand("into"), step.first_column = number(0);
    check(!step.into || step.into.kind == Operand::Kind::result, value, kRunProgram, ": into of step ", at(),
          " of program must be a result");
    step.inner = optional_operand("inner"), step.up = optional_constant("up");
    check(static_cast<bool>(step.inner) == static_cast<bool>(step.up), value, kRunProgram, ": inner and up of step ",
          at(), " of program must both be given, or none");
    for (int64_t parts = number(0); parts > 0; parts--) {
      const int64_t end = number(), column = number();
      step.parts.push_back({end, column});
    }
    return step;
  }

  RopeAppendStep rope_append() {
    RopeAppendStep step;
    step.qkv = shaping("qkv"), step.cos = optional_operand("cos"), step.sin = optional_operand("sin");
    check(static_cast<bool>(step.cos) == static_cast<bool>(step.sin), value, kRunProgram, ": cos and sin of step ",
          at(), " of program must both be given, or none");
    step.keys = state("keys"), step.values = state("values");
    step.start = start();
    step.q_weight = optional_constant("q_weight"), step.k_weight = optional_constant("k_weight");
    step.eps = real(0), step.offset = real(0);
    step.rotation = number(0), step.grouped = number(0) != 0, step.norm_behind = number(0) != 0;
    return step;
  }

  AttentionStep attention() {
    AttentionStep step;
    step.q = shaping("q"), step.keys = state("keys"), step.values = state("values");
    step.start = start();
    step.scale = real();
    step.mask = optional_operand("mask");
    step.causal = number(0) != 0;
    step.score = number(-1);
    step.sink = optional_constant("sink");
    step.cu_seqlens = optional_operand("cu_seqlens");
    check(step.score >= -1 && step.score < static_cast<int64_t>(program_.scores.size()), value, kRunProgram,
          ": score of step ", at(), " of program must be that of a step before, got ", step.score);
    return step;
  }

  SelfAttentionStep self_attention() {
    SelfAttentionStep step;
    step.qkv = shaping("qkv"), step.kv_heads = at_least("kv_heads", 1), step.e = at_least("e", 1);
    step.scale = real();
    step.mask = optional_operand("mask"), step.cu_seqlens = optional_operand("cu_seqlens");
    return step;
  }

  RouteStep route() {
    RouteStep step;
    RouteArgs& numbers = step.numbers;
    step.x = shaping("x");
    numbers.k = number(), step.scoring = number();
    step.weight = optional_constant("weight"), step.bias = optional_constant("bias");
    step.rounds = number(0) != 0;
    step.correction = optional_constant("correction");
    numbers.groups = number(1), numbers.groups_kept = number(1), numbers.group_top = number(1);
    numbers.zero_outside = number(0) != 0, numbers.normalize = number(0) != 0;
    numbers.eps = real(0), numbers.least = real(0), numbers.scale = real(1);
    step.expert_scale = optional_constant("expert_scale");
    return step;
  }

  ExpertsStep experts() {
    ExpertsStep step;
    step.x = shaping("x"), step.gate_up = constant("gate_up"), step.down = constant("down");
    step.index = shaping("index"), step.weights = shaping("weights");
    step.gate_up_spec = spec(), step.gate_up_x_format = number();
    step.down_spec = spec(), step.down_x_format = number();
    step.activation = number();
    step.gate.gated = number() != 0, step.gate.interleaved = number() != 0;
    step.gate.alpha = static_cast<float>(real()), step.gate.limit = static_cast<float>(real());
    step.gate.up_offset = static_cast<float>(real());
    step.gate_up_bias = optional_constant("gate_up_bias"), step.down_bias = optional_constant("down_bias");
    return step;
  }

  PointwiseStep scaled_add() {
    PointwiseStep step;
    step.op = "scaled_add";
    step.x = shaping("x"), step.add = optional_operand("add"), step.gate = optional_operand("gate");
    step.scale = real(1);
    return step;
  }

  WeightSpec spec() {
    const int64_t n = number(), k = number(), format = number(), group_size = number(), asymmetric = number();
    return weight_spec(kRunProgram, n, k, format, group_size, asymmetric != 0);
  }

  int32_t at() const { return static_cast<int32_t>(program_.steps.size()); }  // result index; for use inside made()

  int64_t number(std::optional<int64_t> missing = {}) {
    if (next_ < end_) return code_[next_++];
    check(missing.has_value(), value, kRunProgram, ": step ", at(), " of program must have more fields");
    return *missing;
  }

  double real(std::optional<double> missing = {}) {
    return std::bit_cast<double>(number(missing ? std::optional(std::bit_cast<int64_t>(*missing)) : std::nullopt));
  }

  int64_t at_least(std::string_view name, int64_t least) {
    const int64_t value_ = number();
    check(value_ >= least && value_ <= INT32_MAX, value, kRunProgram, ": ", name, " of step ", at(),
          " of program must be at least ", least, ", got ", value_);
    return value_;
  }

  int64_t start() {
    const int64_t index = at_least("start", 0);
    program_.starts = std::max(program_.starts, static_cast<int32_t>(index + 1));
    return index;
  }

  // 4 * index + kind; -1 for none.
  Operand optional_operand(std::string_view name) {
    const int64_t code = number(-1);
    if (code == -1) return {};
    check(code >= 0 && code / 4 < INT32_MAX, value, kRunProgram, ": ", name, " of step ", at(),
          " of program must be an operand, got ", code);
    const Operand operand{static_cast<Operand::Kind>(code % 4), static_cast<int32_t>(code / 4)};
    if (operand.kind == Operand::Kind::result) {
      check(operand.index < results_, value, kRunProgram, ": ", name, " of step ", at(),
            " of program must be a result of a step before, got result ", operand.index, " of ", results_);
      program_.last_use[static_cast<std::size_t>(operand.index)] = at();
    } else {
      int32_t& count = operand.kind == Operand::Kind::constant ? program_.constants
                       : operand.kind == Operand::Kind::state  ? program_.states
                                                               : program_.inputs;
      count = std::max(count, operand.index + 1);
    }
    return operand;
  }

  Operand operand(std::string_view name) {
    const Operand operand = optional_operand(name);
    check(static_cast<bool>(operand), value, kRunProgram, ": ", name, " of step ", at(), " of program must be given");
    return operand;
  }

  Operand shaping(std::string_view name) {
    const Operand given = operand(name);
    if (given.kind == Operand::Kind::input) program_.shaping_inputs.push_back(given.index);
    return given;
  }

  Operand of_kind(std::string_view name, Operand operand, Operand::Kind kind, std::string_view wanted) {
    check(operand.kind == kind, value, kRunProgram, ": ", name, " of step ", at(), " of program must be a ", wanted);
    return operand;
  }
  Operand constant(std::string_view name) { return of_kind(name, operand(name), Operand::Kind::constant, "constant"); }
  Operand state(std::string_view name) { return of_kind(name, operand(name), Operand::Kind::state, "state"); }
  Operand optional_constant(std::string_view name) {
    const Operand given = optional_operand(name);
    return given ? of_kind(name, given, Operand::Kind::constant, "constant") : given;
  }

  Program& program_;
  std::span<const int64_t> code_;
  std::size_t next_ = 0, end_ = 0;
  int32_t results_ = 0;
};

}  // namespace

Program::Program(std::span<const int64_t> code) { Reader(*this, code).all(); }

}  // namespace lowbit
