// SPDX-License-Identifier: Apache-2.0
#include "score/program.hpp"

#include <bit>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

namespace lowbit {
namespace {

using namespace score;
using enum ErrorKind;

constexpr int64_t kVersion = 1;
constexpr std::size_t kMaxPrograms = 256;
constexpr int64_t kMaxInstructions = 1 << 16;

class Parser {
 public:
  explicit Parser(std::span<const int64_t> code) : code_(code) {}

  ScoreProgram parse() {
    const int64_t version = next("version");
    check(version == kVersion, value, "score program: version must be ", kVersion, ", got ", version);
    const int64_t captured = next("number of captured tensors");
    check(captured >= 0 && captured <= static_cast<int64_t>(code_.size()), value, "score program: cannot have ",
          captured, " captured tensors");
    for (int64_t i = 0; i < captured; i++) captured_type(i);
    const int64_t output = next("output");
    while (at_ < code_.size()) instruction();
    check(output >= 0 && output < count(), value, "score program: output must be one of its ", count(), " values, got ",
          output);
    return program(values_[output]);
  }

 private:
  int64_t count() const { return static_cast<int64_t>(values_.size()); }

  int64_t next(std::string_view what) {
    check(at_ < code_.size(), value, "score program: ends before its ", what);
    return code_[at_++];
  }

  void captured_type(int64_t number) {
    const int64_t type = next("captured types"), rank = next("captured ranks");
    check(type >= 0 && type < 3, value, "score program: type of captured tensor ", number, " must be 0, 1 or 2, got ",
          type);
    check(rank >= 0 && rank <= TensorView::kMaxRank, value, "score program: rank of captured tensor ", number,
          " must be 0..", TensorView::kMaxRank, ", got ", rank);
    graph_.captured.push_back({"fib"[type], static_cast<int>(rank)});
  }

  int operand(char type, std::string_view op) {
    const int64_t number = next("operands");
    check(number >= 0 && number < count(), value, "score program: value ", count(), " (", op, ") reads value ", number,
          ", which is not before it");
    const char got = graph_.nodes[values_[number]].type;
    check(got == type, value, "score program: value ", count(), " (", op, ") takes ", type_name(type), ", but value ",
          number, " is ", type_name(got));
    return values_[number];
  }
  static std::string_view type_name(char type) { return type == 'f' ? "float" : type == 'i' ? "int" : "bool"; }

  void instruction() {
    check(count() < kMaxInstructions, value, "score program: has more than ", kMaxInstructions, " instructions");
    const int64_t op = next("opcode");
    const bool known = op >= 0 && op < op_count() && !(op >= number_of<Gradient>() && op <= number_of<ScaledTanh>());
    check(known, value, "score program: value ", count(), " has the unknown opcode ", op);
    values_.push_back(value_of(static_cast<int>(op)));
  }

  int value_of(int op) {
    const auto [name, types] = op_info(op);
    if (op == number_of<FloatConst>()) return graph_.constant(std::bit_cast<double>(next("constant")));
    if (op == number_of<IntConst>() || op == number_of<BoolConst>()) {
      const int64_t number = next("constant");
      const bool fits =
          op == number_of<BoolConst>() ? number == 0 || number == 1 : number == static_cast<int32_t>(number);
      check(fits, value, "score program: value ", count(), " (", name, ") does not hold ", number);
      return graph_.constant_int(number, types.back());
    }
    std::array<int, kMaxOperands> operands{};
    std::size_t arity = 0;
    if (op == number_of<Gather>()) {
      const int64_t tensor = next("captured tensor");
      check(tensor >= 0 && tensor < static_cast<int64_t>(graph_.captured.size()), value, "score program: value ",
            count(), " gathers from captured tensor ", tensor, " of ", graph_.captured.size());
      for (int i = 0; i < graph_.captured[tensor].rank; i++) operands[arity++] = operand('i', name);
      return graph_.gather(tensor, {operands.data(), arity});
    }
    for (; types[arity] != '>'; arity++) operands[arity] = operand(types[arity], name);
    return arity == 0 ? graph_.leaf(op) : graph_.emit(op, {operands.data(), arity});
  }

  ScoreProgram program(int output) {
    const char type = graph_.nodes[output].type;
    check(type != 'i', value, "score program: the result must be float (a score) or bool (a mask), got int");
    ScoreProgram result;
    result.is_mask = type == 'b';
    result.graph = with_diagonals(graph_, {&output, 1});
    result.output = output;
    ScoreGraph graph = result.graph;
    if (result.is_mask) {
      const int score = graph.leaf(number_of<Score>()),
                never = graph.constant(-std::numeric_limits<double>::infinity());
      result.forward = score_plan(graph, graph.emit<Where>({output, score, never}), kScoreMemory, {}, false);
      return result;
    }
    result.forward = score_plan(graph, output, kScoreMemory);
    std::vector<int> scatters;
    const int gradient = add_gradients(graph, output, &scatters);
    result.backward = score_plan(graph, gradient, kGradientMemory, scatters);
    result.backward_only = score_plan(graph, gradient, kGradientMemory);
    return result;
  }

  std::span<const int64_t> code_;
  std::size_t at_ = 0;
  ScoreGraph graph_;
  std::vector<int> values_;  // graph value of each instruction
};

bool fits(DType dtype, char type) {
  switch (dtype) {
    case DType::float32: case DType::bfloat16: case DType::float16: case DType::float64: return type == 'f';
    case DType::int32: case DType::int64: return type == 'i';
    case DType::boolean: return type == 'b';
    default: return false;
  }
}

// Ints of a program have 32 bits: returns the first element that does not fit.
std::optional<int64_t> wide_element(const TensorView& view, int dim = 0, int64_t at = 0) {
  if (dim == view.rank) {
    const int64_t element = view.as<const int64_t>()[at];
    return element == static_cast<int32_t>(element) ? std::nullopt : std::optional(element);
  }
  const int64_t size = view.stride[dim] == 0 ? std::min<int64_t>(view.shape[dim], 1) : view.shape[dim];
  for (int64_t i = 0; i < size; i++)
    if (const auto wide = wide_element(view, dim + 1, at + i * view.stride[dim])) return wide;
  return std::nullopt;
}

}  // namespace

std::shared_ptr<const ScoreProgram> score_program(std::span<const int64_t> code) {
  // Per thread: a lock held by another thread while the process forks would never be released in the child.
  thread_local std::map<std::vector<int64_t>, std::shared_ptr<const ScoreProgram>> known;
  const std::vector<int64_t> key(code.begin(), code.end());
  if (const auto found = known.find(key); found != known.end()) return found->second;
  auto program = std::make_shared<const ScoreProgram>(Parser(code).parse());
  if (known.size() >= kMaxPrograms) known.clear();  // a training run has a handful
  return known[key] = std::move(program);
}

ScoreCall::ScoreCall(std::string_view op, std::string_view argument, std::span<const int64_t> code,
                     std::vector<TensorView> captured)
    : op_(op), argument_(argument), program_(score_program(code)), captured_(std::move(captured)) {
  const std::vector<CapturedType>& types = program_->graph.captured;
  check(captured_.size() == types.size(), value, op, ": ", argument, " must have ", types.size(),
        " captured tensors, got ", captured_.size());
  for (std::size_t i = 0; i < types.size(); i++) {
    const TensorView& view = captured_[i];
    const std::string_view wanted = types[i].type == 'f'   ? "a float tensor"
                                    : types[i].type == 'i' ? "int32 or int64"
                                                           : "bool";
    check(fits(view.dtype, types[i].type), ErrorKind::type, op, ": captured tensor ", i, " of ", argument, " must be ",
          wanted, ", got ", name_of(view.dtype));
    check(view.rank == types[i].rank, value, op, ": captured tensor ", i, " of ", argument, " must have ",
          types[i].rank, " dimensions, got shape ", shape_text(view));
  }
}

void ScoreCall::check_captured() const {
  if (captured_checked_.load(std::memory_order_acquire)) return;
  for (std::size_t i = 0; i < captured_.size(); i++) {
    const TensorView& view = captured_[i];
    const auto wide = view.dtype == DType::int64 && view.numel() > 0 ? wide_element(view) : std::nullopt;
    check(!wide, value, op_, ": captured tensor ", i, " of ", argument_, " must hold integers of 32 bits, got ",
          wide.value_or(0));
  }
  captured_checked_.store(true, std::memory_order_release);
}

void ScoreCall::check_fault() const {
  if (!fault_.seen.load()) return;
  check(fault_.tensor != ScoreFault::kDivision, runtime, op_, ": ", argument_, " divides an integer by zero");
  throw Error(ErrorKind::index, concat(op_, ": ", argument_, " reads index ", fault_.index, " of dimension ",
                                       fault_.dim, " of captured tensor ", fault_.tensor, ", which has size ",
                                       captured_[fault_.tensor].shape[fault_.dim]));
}

}  // namespace lowbit
