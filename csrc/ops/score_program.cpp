// SPDX-License-Identifier: Apache-2.0
#include "ops/score_program.hpp"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "formats/format.hpp"

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
    check(captured >= 0 && captured <= static_cast<int64_t>(code_.size()), value, "score program: cannot have ", captured, " captured tensors");
    for (int64_t i = 0; i < captured; i++) captured_type(i);
    const int64_t output = next("output");
    while (at_ < code_.size()) instruction();
    check(output >= 0 && output < count(), value, "score program: output must be one of its ", count(), " values, got ", output);
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
    check(type >= 0 && type < 3, value, "score program: type of captured tensor ", number, " must be 0, 1 or 2, got ", type);
    check(rank >= 0 && rank <= TensorView::kMaxRank, value, "score program: rank of captured tensor ", number, " must be 0..",
          TensorView::kMaxRank, ", got ", rank);
    graph_.captured.push_back({"fib"[type], static_cast<int>(rank)});
  }

  int operand(char type, std::string_view op) {
    const int64_t number = next("operands");
    check(number >= 0 && number < count(), value, "score program: value ", count(), " (", op, ") reads value ", number, ", which is not before it");
    const char got = graph_.nodes[values_[number]].type;
    check(got == type, value, "score program: value ", count(), " (", op, ") takes ", type_name(type), ", but value ", number, " is ", type_name(got));
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
      const bool fits = op == number_of<BoolConst>() ? number == 0 || number == 1 : number == static_cast<int32_t>(number);
      check(fits, value, "score program: value ", count(), " (", name, ") does not hold ", number);
      return graph_.constant_int(number, types.back());
    }
    std::array<int, kMaxOperands> operands{};
    std::size_t arity = 0;
    if (op == number_of<Gather>()) {
      const int64_t tensor = next("captured tensor");
      check(tensor >= 0 && tensor < static_cast<int64_t>(graph_.captured.size()), value, "score program: value ", count(),
            " gathers from captured tensor ", tensor, " of ", graph_.captured.size());
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
      const int score = graph.leaf(number_of<Score>()), never = graph.constant(-std::numeric_limits<double>::infinity());
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
  std::vector<int> values_;  // per instruction, its value in the graph
};

bool fits(DType dtype, char type) {
  switch (dtype) {
    case DType::float32: case DType::bfloat16: case DType::float16: case DType::float64: return type == 'f';
    case DType::int32: case DType::int64: return type == 'i';
    case DType::boolean: return type == 'b';
    default: return false;
  }
}

// Ints of a program are 32 bits wide: the first element that does not fit.
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

ScoreProgramArgs tile_args(const ScoreCall& call, std::string_view op, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores) {
  check(scores.rank == 2, value, op, ": scores must have shape [rows, cols], got ", shape_text(scores));
  check(scores.dtype == DType::float32 || scores.dtype == DType::float64, type, op, ": scores must be float32 or float64, got ", name_of(scores.dtype));
  check(scores.is_contiguous(), value, op, ": scores must be contiguous");
  check(scores.numel() < (int64_t{1} << 31), value, op, ": scores must have less than 2^31 elements, got ", scores.numel());
  return {.call = &call, .dtype = scores.dtype, .b = b, .h = h, .q0 = q0, .k0 = k0, .rows = static_cast<int>(scores.shape[0]),
          .cols = static_cast<int>(scores.shape[1]), .stride = round_up(scores.shape[1], 16)};
}

// A tile must have whole vectors in its rows: a copy with padding, and back.
class Padded {
 public:
  Padded(const TensorView& view, int64_t stride)
      : view_(view), row_(view.shape[1] * static_cast<int64_t>(size_of(view.dtype))), stride_(stride * static_cast<int64_t>(size_of(view.dtype))),
        bytes_(static_cast<std::size_t>(view.shape[0] * stride_)) {
    for (int64_t r = 0; r < view_.shape[0]; r++) std::memcpy(bytes_.data() + r * stride_, view_.as<char>() + r * row_, row_);
  }
  void* data() { return bytes_.data(); }
  void write_back() const {
    for (int64_t r = 0; r < view_.shape[0]; r++) std::memcpy(view_.as<char>() + r * row_, bytes_.data() + r * stride_, row_);
  }

 private:
  const TensorView& view_;
  int64_t row_, stride_;
  std::vector<char> bytes_;
};

}  // namespace

std::shared_ptr<const ScoreProgram> score_program(std::span<const int64_t> code) {
  // Per thread: a lock that another thread holds while the process forks would never be released in the child.
  thread_local std::map<std::vector<int64_t>, std::shared_ptr<const ScoreProgram>> known;
  const std::vector<int64_t> key(code.begin(), code.end());
  if (const auto found = known.find(key); found != known.end()) return found->second;
  auto program = std::make_shared<const ScoreProgram>(Parser(code).parse());
  if (known.size() >= kMaxPrograms) known.clear();  // a training run has a handful
  return known[key] = std::move(program);
}

ScoreCall::ScoreCall(std::string_view op, std::string_view argument, std::span<const int64_t> code, std::vector<TensorView> captured)
    : op_(op), argument_(argument), program_(score_program(code)), captured_(std::move(captured)) {
  const std::vector<CapturedType>& types = program_->graph.captured;
  check(captured_.size() == types.size(), value, op, ": ", argument, " must have ", types.size(), " captured tensors, got ", captured_.size());
  for (std::size_t i = 0; i < types.size(); i++) {
    const TensorView& view = captured_[i];
    const std::string_view wanted = types[i].type == 'f' ? "a float tensor" : types[i].type == 'i' ? "int32 or int64" : "bool";
    check(fits(view.dtype, types[i].type), ErrorKind::type, op, ": captured tensor ", i, " of ", argument, " must be ", wanted, ", got ", name_of(view.dtype));
    check(view.rank == types[i].rank, value, op, ": captured tensor ", i, " of ", argument, " must have ", types[i].rank,
          " dimensions, got shape ", shape_text(view));
    const auto wide = view.dtype == DType::int64 && view.numel() > 0 ? wide_element(view) : std::nullopt;
    check(!wide, value, op, ": captured tensor ", i, " of ", argument, " must hold integers of 32 bits, got ", wide.value_or(0));
  }
}

void ScoreCall::check_fault() const {
  if (!fault_.seen.load()) return;
  check(fault_.tensor != ScoreFault::kDivision, runtime, op_, ": ", argument_, " divides an integer by zero");
  throw Error(ErrorKind::index, concat(op_, ": ", argument_, " reads index ", fault_.index, " of dimension ", fault_.dim, " of captured tensor ",
                                       fault_.tensor, ", which has size ", captured_[fault_.tensor].shape[fault_.dim]));
}

void score_program_eval(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores) {
  ScoreProgramArgs args = tile_args(call, "score_program_eval", b, h, q0, k0, scores);
  if (scores.numel() == 0) return;
  Padded padded(scores, args.stride);
  args.scores = padded.data();
  run(args);
  call.check_fault();
  padded.write_back();
}

void score_program_backward(const ScoreCall& call, int64_t b, int64_t h, int64_t q0, int64_t k0, const TensorView& scores,
                            const TensorView& gradient, std::span<const TensorView> captured_gradients) {
  constexpr std::string_view op = "score_program_backward";
  ScoreProgramArgs args = tile_args(call, op, b, h, q0, k0, scores);
  check(!call.program().is_mask, value, op, ": code must be of a score_mod, got a mask");
  check(gradient.rank == 2 && gradient.shape == scores.shape && gradient.dtype == scores.dtype && gradient.is_contiguous(), value, op,
        ": gradient must be contiguous, of the shape and dtype of scores ", shape_text(scores), ", got ", name_of(gradient.dtype), " ", shape_text(gradient));
  check(static_cast<int>(captured_gradients.size()) == call.captured_count(), value, op, ": captured_gradients must have one entry per captured tensor (",
        call.captured_count(), "), got ", captured_gradients.size());
  std::vector<CapturedGradient> targets;
  for (int i = 0; i < call.captured_count(); i++) {
    const TensorView& target = captured_gradients[i];
    const TensorView& tensor = call.captured()[i];
    bool same = target.rank == tensor.rank && target.dtype == scores.dtype && target.is_contiguous();
    for (int dim = 0; dim < tensor.rank; dim++) same &= target.shape[dim] == tensor.shape[dim];
    check(!target || same, value, op, ": captured_gradients[", i, "] must be contiguous ", name_of(scores.dtype), " ", shape_text(tensor), ", got ",
          name_of(target.dtype), " ", shape_text(target));
    targets.push_back({.data = target.data});
  }
  if (scores.numel() == 0) return;
  Padded padded(scores, args.stride), padded_gradient(gradient, args.stride);
  args.scores = padded.data(), args.gradient = padded_gradient.data(), args.captured_gradients = targets.data();
  run(args);
  call.check_fault();
  padded_gradient.write_back();
}

}  // namespace lowbit
