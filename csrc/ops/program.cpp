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
  static int count_results(const MaskRowsStep&) { return 0; }
  static int count_results(const HeadsStep& step) { return step.into ? 0 : 1; }
  static int count_results(const ScaleColumnsStep&) { return 0; }
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
      case StepKind::cross_attention: return cross_attention();
      case StepKind::mask_rows: return mask_rows();
      case StepKind::scale_columns: return scale_columns();
      case StepKind::causal_conv1d: return causal_conv1d();
      case StepKind::gated_delta_rule: return gated_delta_rule();
      case StepKind::ssd: return ssd();
      case StepKind::selective_scan: return selective_scan();
      case StepKind::gated_rms_norm: return gated_rms_norm();
      case StepKind::heads: return heads();
      case StepKind::head_linear: return head_linear();
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
    check_both("inner and up", step.inner, step.up);
    for (int64_t parts = number(0); parts > 0; parts--) {
      const int64_t end = number(), column = number();
      step.parts.push_back({end, column});
    }
    return step;
  }

  RopeAppendStep rope_append() {
    RopeAppendStep step;
    step.qkv = shaping("qkv"), step.cos = optional_operand("cos"), step.sin = optional_operand("sin");
    check_both("cos and sin", step.cos, step.sin);
    step.keys = state("keys"), step.values = state("values");
    step.start = start();
    step.q_weight = optional_constant("q_weight"), step.k_weight = optional_constant("k_weight");
    step.eps = real(0), step.offset = real(0);
    step.rotation = number(0), step.grouped = number(0) != 0, step.norm_behind = number(0) != 0;
    step.gated = number(0) != 0;
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

  CrossAttentionStep cross_attention() {
    CrossAttentionStep step;
    step.q = shaping("q"), step.keys = operand("keys"), step.values = operand("values");
    step.scale = real();
    step.mask = optional_operand("mask");
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
    step.gate_size = at_least("gate_size", 0, 0), step.gate_column = at_least("gate_column", 0, 0);
    step.gate_step = at_least("gate_step", 0, 0);
    check(step.gate_size == 0 || (step.gate && step.gate_step >= step.gate_size), value, kRunProgram,
          ": gate_step of step ", at(), " of program must be at least gate_size, and a gate given, got ",
          step.gate_step);
    const int64_t function = number(0);
    check(function == 0 || function == 1, value, kRunProgram, ": gate_function of step ", at(),
          " of program must be 0 or 1, got ", function);
    step.gate_function = static_cast<GateFunction>(function);
    constexpr DType kResults[] = {DType::float32, DType::bfloat16, DType::float16};
    const int64_t result = number(0);
    check(result >= 0 && result <= 3, value, kRunProgram, ": result of step ", at(), " of program must be 0 to 3, got ",
          result);
    if (result > 0) step.result = kResults[result - 1];
    return step;
  }

  MaskRowsStep mask_rows() {
    MaskRowsStep step;
    step.x = of_kind("x", operand("x"), Operand::Kind::result, "result");
    step.mask = of_kind("mask", operand("mask"), Operand::Kind::input, "input");
    return step;
  }

  ScaleColumnsStep scale_columns() {
    ScaleColumnsStep step;
    step.x = of_kind("x", operand("x"), Operand::Kind::result, "result");
    step.factors = constant("factors");
    return step;
  }

  CausalConv1dStep causal_conv1d() {
    CausalConv1dStep step;
    step.x = shaping("x"), step.weight = constant("weight"), step.state = state("state");
    step.bias = optional_constant("bias");
    step.column = at_least("column", 0, 0), step.silu = number(0) != 0;
    return step;
  }

  GatedDeltaRuleStep gated_delta_rule() {
    GatedDeltaRuleStep step;
    step.qkv = shaping("qkv"), step.g = shaping("g"), step.beta = shaping("beta"), step.state = state("state");
    step.key_heads = at_least("key_heads", 1), step.dk = at_least("dk", 1);
    step.heads = at_least("heads", 1), step.dv = at_least("dv", 1);
    step.scale = real(), step.l2norm = number(0) != 0;
    step.a_log = optional_constant("A_log"), step.dt_bias = optional_constant("dt_bias");
    step.g_column = at_least("g_column", 0, 0), step.beta_column = at_least("beta_column", 0, 0);
    step.beta_scale = real(1);
    step.per_channel = number(0) != 0;
    return step;
  }

  SsdStep ssd() {
    SsdStep step;
    step.xbc = shaping("xBC"), step.dt = shaping("dt"), step.a = constant("A"), step.state = state("state");
    step.heads = at_least("heads", 1), step.p = at_least("p", 1);
    step.groups = at_least("groups", 1), step.s = at_least("s", 1);
    step.dt_min = real(), step.dt_max = real();
    step.d = optional_constant("D"), step.dt_bias = optional_constant("dt_bias");
    step.softplus = number(0) != 0, step.dt_column = at_least("dt_column", 0, 0);
    return step;
  }

  SelectiveScanStep selective_scan() {
    SelectiveScanStep step;
    step.x = shaping("x"), step.dt = shaping("dt"), step.a = constant("A");
    step.b = shaping("B"), step.c = shaping("C"), step.state = state("state");
    step.s = at_least("s", 1);
    step.dt_min = real(), step.dt_max = real();
    step.d = optional_constant("D"), step.dt_bias = optional_constant("dt_bias");
    step.z = optional_operand("z"), step.softplus = number(0) != 0;
    step.b_column = at_least("b_column", 0, 0), step.c_column = at_least("c_column", 0, 0);
    step.z_column = at_least("z_column", 0, 0);
    return step;
  }

  GatedRmsNormStep gated_rms_norm() {
    GatedRmsNormStep step;
    step.x = shaping("x"), step.gate = shaping("gate"), step.weight = constant("weight");
    step.eps = real(), step.group_size = number();
    step.sigmoid = number(0) != 0, step.gate_first = number(0) != 0;
    step.gate_column = at_least("gate_column", 0, 0);
    return step;
  }

  HeadsStep heads() {
    HeadsStep step;
    step.x = shaping("x"), step.heads = at_least("heads", 1), step.size = at_least("size", 1);
    step.column = at_least("column", 0), step.step = at_least("step", step.size);
    step.into = optional_operand("into"), step.into_column = at_least("into_column", 0, 0);
    const bool of_state = step.into.kind == Operand::Kind::state;
    check(!step.into || of_state || step.into.kind == Operand::Kind::result, value, kRunProgram, ": into of step ",
          at(), " of program must be a result or a state");
    if (of_state) step.start = start();
    else check(number(-1) == -1, value, kRunProgram, ": start of step ", at(), " of program must come with a state");
    step.cos = optional_operand("cos"), step.sin = optional_operand("sin");
    check_both("cos and sin", step.cos, step.sin);
    step.rotation = number(0), step.weight = optional_constant("weight");
    step.eps = real(0), step.offset = real(0);
    return step;
  }

  HeadLinearStep head_linear() {
    HeadLinearStep step;
    step.x = shaping("x"), step.weight = constant("weight");
    step.spec = spec();
    step.x_format = number();
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

  int64_t at_least(std::string_view name, int64_t least, std::optional<int64_t> missing = {}) {
    const int64_t value_ = number(missing);
    check(value_ >= least && value_ <= INT32_MAX, value, kRunProgram, ": ", name, " of step ", at(),
          " of program must be at least ", least, ", got ", value_);
    return value_;
  }

  void check_both(std::string_view names, const Operand& one, const Operand& other) const {
    check(static_cast<bool>(one) == static_cast<bool>(other), value, kRunProgram, ": ", names, " of step ", at(),
          " of program must both be given, or none");
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
