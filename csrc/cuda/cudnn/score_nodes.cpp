// SPDX-License-Identifier: Apache-2.0
#include "cuda/cudnn/score_nodes.hpp"

#include <bit>
#include <cmath>
#include <map>

#include "score/program.hpp"

namespace lowbit::cuda {
namespace {

using namespace score;

// Ops that are one node, of the same operands.
struct SameOp {
  int op;
  Pointwise what;
};
constexpr SameOp kSame[] = {
    {number_of<Add>(), Pointwise::add},          {number_of<AddInt>(), Pointwise::add},
    {number_of<Sub>(), Pointwise::sub},          {number_of<SubInt>(), Pointwise::sub},
    {number_of<Mul>(), Pointwise::mul},          {number_of<MulInt>(), Pointwise::mul},
    {number_of<Div>(), Pointwise::div},          {number_of<Pow>(), Pointwise::pow},
    {number_of<Neg>(), Pointwise::neg},          {number_of<NegInt>(), Pointwise::neg},
    {number_of<Abs>(), Pointwise::abs},          {number_of<AbsInt>(), Pointwise::abs},
    {number_of<Floor>(), Pointwise::floor},      {number_of<Ceil>(), Pointwise::ceil},
    {number_of<Sqrt>(), Pointwise::sqrt},        {number_of<Rsqrt>(), Pointwise::rsqrt},
    {number_of<Exp>(), Pointwise::exp},          {number_of<Log>(), Pointwise::log},
    {number_of<Sin>(), Pointwise::sin},          {number_of<Cos>(), Pointwise::cos},
    {number_of<Tan>(), Pointwise::tan},          {number_of<Tanh>(), Pointwise::tanh},
    {number_of<Sigmoid>(), Pointwise::sigmoid},  {number_of<Erf>(), Pointwise::erf},
};

constexpr int kMostNodes = 64;
constexpr double kMostExact = 16777216;  // 2^24

class Lowering {
 public:
  Lowering(const ScoreCall& mod, const ScoreGraph& graph, const std::array<int64_t, 4>& extents, ScoreNodes& to)
      : mod_(mod), graph_(graph), extents_(extents), to_(to) {}

  std::string_view refused;

  int lower(int number) {
    if (!refused.empty()) return 0;
    if (const auto found = made_.find(number); found != made_.end()) return found->second;
    if (graph_.nodes[static_cast<std::size_t>(number)].type == 'i' && !is_exact(number))
      return refuse("score_mod has integers that a float may not hold exactly");
    const int made = make(number);
    if (std::ssize(to_.nodes) > kMostNodes) refuse("score_mod is more than 64 nodes of cuDNN");
    return made_[number] = made;
  }

 private:
  int refuse(std::string_view why) { return refused = why, 0; }
  int add(const PointwiseNode& node) { return to_.nodes.push_back(node), static_cast<int>(to_.nodes.size()) - 1; }
  int constant(float value) { return add({.what = Pointwise::constant, .value = value}); }
  int index(int axis) {
    if (index_[static_cast<std::size_t>(axis)] < 0)
      index_[static_cast<std::size_t>(axis)] = add({.what = Pointwise::index, .which = axis});
    return index_[static_cast<std::size_t>(axis)];
  }
  bool is_given(int node) const {  // to the graph, and not made in it
    const Pointwise what = to_.nodes[static_cast<std::size_t>(node)].what;
    return what == Pointwise::constant || what == Pointwise::tensor;
  }
  int as_made(int node) {
    if (!is_given(node)) return node;
    const int zero = add({.what = Pointwise::mul, .from = {index(2), constant(0)}});
    return add({.what = Pointwise::add, .from = {zero, node}});
  }
  int node(Pointwise what, int a, int b = -1) {
    const bool either_way = what == Pointwise::add || what == Pointwise::mul;
    if (either_way && is_given(a)) std::swap(a, b);
    return add({.what = what, .from = {as_made(a), b}});
  }

  int make(int number) {
    const ScoreNode& of = graph_.nodes[static_cast<std::size_t>(number)];
    const auto operand = [&](int i) { return lower(of.operands[static_cast<std::size_t>(i)]); };
    if (of.op == number_of<Score>()) return add({.what = Pointwise::score});
    if (of.op == number_of<Gradient>()) return add({.what = Pointwise::gradient});
    if (const int axis = axis_of(of.op); axis >= 0) return index(axis);
    if (of.op == number_of<KMinusQ>()) return node(Pointwise::sub, index(3), index(2));
    if (of.op == number_of<FloatConst>() || of.op == number_of<IntConst>()) return made_constant(of);
    if (of.op == number_of<Gather>()) return gather(of);
    if (of.op == number_of<IntToFloat>()) return operand(0);
    for (const SameOp& same : kSame)
      if (same.op == of.op) {
        const int a = operand(0), b = of.operand_count > 1 ? operand(1) : -1;
        return refused.empty() ? node(same.what, a, b) : 0;
      }
    return composed(of);
  }

  // Ops of several nodes.
  int composed(const ScoreNode& of) {
    const bool to_2 = of.op == number_of<Exp2>(), of_2 = of.op == number_of<Log2>();
    if (!to_2 && !of_2) return refuse("cuDNN has no node for an op of score_mod");
    const int from = lower(of.operands[0]);
    if (!refused.empty()) return 0;
    if (to_2) return node(Pointwise::exp, node(Pointwise::mul, from, constant(0.6931471805599453f)));
    return node(Pointwise::mul, node(Pointwise::log, from), constant(1.4426950408889634f));
  }

  static int axis_of(int op) {
    constexpr int kAxes[] = {number_of<B>(), number_of<H>(), number_of<Q>(), number_of<K>()};
    for (int axis = 0; axis < 4; axis++)
      if (op == kAxes[axis]) return axis;
    return -1;
  }

  int made_constant(const ScoreNode& of) {
    const auto value = of.type == 'f' ? static_cast<float>(std::bit_cast<double>(of.immediate))
                                      : static_cast<float>(of.immediate);
    if (!std::isfinite(value)) return refuse("score_mod has inf: rows that it hides whole have to be 0");
    return constant(value);
  }

  int gather(const ScoreNode& of) {
    const auto captured = static_cast<std::size_t>(of.immediate);
    const TensorView& tensor = mod_.captured()[captured];
    if (tensor.dtype != DType::float32 && tensor.dtype != DType::bfloat16 && tensor.dtype != DType::float16)
      return refuse("score_mod reads a tensor that is not float32, bfloat16 or float16");
    BroadcastTensor as{.captured = static_cast<int>(captured), .dtype = tensor.dtype, .size = {1, 1, 1, 1}};
    for (int d = 0; d < of.operand_count; d++) {
      const int axis = axis_of(graph_.nodes[static_cast<std::size_t>(of.operands[static_cast<std::size_t>(d)])].op);
      const auto at = static_cast<std::size_t>(axis);
      if (axis < 0 || as.size[at] != 1 || tensor.size(d) < extents_[at])
        return refuse("score_mod reads a tensor elsewhere than at b, h, q and k");
      as.size[at] = extents_[at], as.stride[at] = tensor.stride[d];
    }
    for (std::size_t axis = 0; axis < 4; axis++)  // where it does not vary, as if it were dense
      if (as.size[axis] == 1) as.stride[axis] = 1;
    to_.tensors.push_back(as);
    return add({.what = Pointwise::tensor, .which = static_cast<int>(to_.tensors.size()) - 1});
  }

  bool is_exact(int number) {
    const Interval of = interval(number);
    return -kMostExact <= of.low && of.high <= kMostExact;
  }
  Interval interval(int number) {
    if (const auto found = intervals_.find(number); found != intervals_.end()) return found->second;
    return intervals_[number] = computed_interval(number);
  }
  Interval computed_interval(int number) {
    const ScoreNode& of = graph_.nodes[static_cast<std::size_t>(number)];
    const auto operand = [&](int i) { return interval(of.operands[static_cast<std::size_t>(i)]); };
    if (const int axis = axis_of(of.op); axis >= 0)
      return {0, static_cast<double>(extents_[static_cast<std::size_t>(axis)] - 1)};
    if (of.op == number_of<KMinusQ>())
      return {1 - static_cast<double>(extents_[2]), static_cast<double>(extents_[3]) - 1};
    if (of.op == number_of<IntConst>()) return {static_cast<double>(of.immediate), static_cast<double>(of.immediate)};
    if (of.op == number_of<AddInt>()) return AddInt::interval(operand(0), operand(1));
    if (of.op == number_of<SubInt>()) return SubInt::interval(operand(0), operand(1));
    if (of.op == number_of<MulInt>()) return MulInt::interval(operand(0), operand(1));
    if (of.op == number_of<NegInt>()) return NegInt::interval(operand(0));
    if (of.op == number_of<AbsInt>()) return AbsInt::interval(operand(0));
    return {};
  }

  const ScoreCall& mod_;
  const ScoreGraph& graph_;
  const std::array<int64_t, 4>& extents_;
  ScoreNodes& to_;
  std::map<int, int> made_;
  std::map<int, Interval> intervals_;
  std::array<int, 4> index_{-1, -1, -1, -1};
};

}  // namespace

std::string_view make_score_nodes(const ScoreCall& mod, const std::array<int64_t, 4>& extents, bool backward,
                                  ScoreNodes& to) {
  ScoreGraph graph = mod.program().graph;
  const int output = mod.program().output;
  const int gradient = backward ? add_gradients(graph, output, nullptr) : -1;
  Lowering lowering(mod, graph, extents, to);
  to.modified = lowering.lower(output);
  if (backward && lowering.refused.empty()) to.gradient = lowering.lower(gradient);
  return lowering.refused;
}

}  // namespace lowbit::cuda
