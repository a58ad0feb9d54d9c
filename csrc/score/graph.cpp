// SPDX-License-Identifier: Apache-2.0
#include "score/graph.hpp"

#include <bit>
#include <cstdlib>
#include <initializer_list>
#include <span>
#include <utility>

namespace lowbit {
namespace {

using namespace score;

template <class... Ops>
constexpr auto infos(OpList<Ops...>) { return std::array{OpInfo{Ops::name, Ops::types}...}; }
constexpr auto kInfos = infos(ScoreOps{});

double as_double(int64_t bits) { return std::bit_cast<double>(bits); }
int64_t as_bits(double value) { return std::bit_cast<int64_t>(value); }

// Constants are folded in double and int64: never less exact than the machine.
template <class Op, std::size_t... at>
int64_t fold_as(const int64_t* in, std::index_sequence<at...>) {
  const auto result = Op::value([&]() -> ScoreCell<Op::types[at], double> {
    if constexpr (Op::types[at] == 'f') return as_double(in[at]);
    else return in[at];
  }()...);
  if constexpr (Op::types.back() == 'f') return as_bits(result);
  else return static_cast<int64_t>(result);
}
using Fold = int64_t (*)(const int64_t*);
template <class Op>
constexpr Fold fold_of() {
  if constexpr (has_value<Op>())
    return [](const int64_t* in) { return fold_as<Op>(in, std::make_index_sequence<arity_of<Op>()>{}); };
  else return nullptr;
}
template <class... Ops>
constexpr auto folds(OpList<Ops...>) { return std::array{fold_of<Ops>()...}; }
constexpr auto kFolds = folds(ScoreOps{});

bool is_power_of_two(int64_t a) { return a > 0 && (a & (a - 1)) == 0; }

}  // namespace

const OpInfo& op_info(int op) { return kInfos[op]; }
int op_count() { return static_cast<int>(kInfos.size()); }

int ScoreGraph::add(const ScoreNode& node) {
  std::array<int64_t, kMaxOperands + 2> key{node.op, node.immediate};
  for (int i = 0; i < kMaxOperands; i++) key[i + 2] = i < node.operand_count ? node.operands[i] : -1;
  const auto [at, fresh] = known_.try_emplace(key, static_cast<int>(nodes.size()));
  if (!fresh) return at->second;
  ScoreNode& made = nodes.emplace_back(node);
  made.of_score = node.op == number_of<Score>() || node.op == number_of<Gradient>();
  for (int i = 0; i < node.operand_count; i++) made.of_score |= nodes[node.operands[i]].of_score;
  return at->second;
}

int ScoreGraph::constant(double value) {
  return add({.op = number_of<FloatConst>(), .type = 'f', .immediate = as_bits(value)});
}
int ScoreGraph::constant_int(int64_t value, char type) {
  return add({.op = type == 'b' ? number_of<BoolConst>() : number_of<IntConst>(), .type = type, .immediate = value});
}

int ScoreGraph::leaf(int op) {
  Rate rate = Rate::tile;
  if (op == number_of<B>() || op == number_of<H>()) rate = Rate::head;
  if (op == number_of<Q>()) rate = Rate::row;
  if (op == number_of<K>()) rate = Rate::column;
  if (op == number_of<KMinusQ>()) rate = Rate::diagonal;
  return add({.op = op, .type = op_info(op).types.back(), .rate = rate});
}

int ScoreGraph::gather(int64_t tensor, std::span<const int> indices) {
  ScoreNode node{.op = number_of<Gather>(), .type = captured[tensor].type, .rate = Rate::head, .immediate = tensor};
  for (int index : indices) node.operands[node.operand_count++] = index, node.rate = join(node.rate, nodes[index].rate);
  return add(node);
}

int ScoreGraph::scatter_add(int64_t tensor, int value, std::span<const int> indices) {
  ScoreNode node{.op = number_of<ScatterAdd>(), .rate = join(Rate::head, nodes[value].rate), .immediate = tensor};
  node.operands[node.operand_count++] = value;
  for (int index : indices) node.operands[node.operand_count++] = index, node.rate = join(node.rate, nodes[index].rate);
  return add(node);
}

int ScoreGraph::sum(int value, Rate rate) {
  if (nodes[value].rate == rate || is_constant(value)) return value;  // the only constant that gets here is 0
  return add({.op = number_of<Sum>(),
              .rate = rate,
              .operand_count = 1,
              .operands = {value},
              .immediate = static_cast<int64_t>(rate)});
}

double ScoreGraph::float_value(int node) const { return as_double(nodes[node].immediate); }
bool ScoreGraph::is_float(int node, double value) const { return is<FloatConst>(node) && float_value(node) == value; }
bool ScoreGraph::is_int(int node, int64_t value) const {
  return (is<IntConst>(node) || is<BoolConst>(node)) && nodes[node].immediate == value;
}

int ScoreGraph::fold(int op, std::span<const int> operands) {
  int64_t in[3] = {};
  for (std::size_t i = 0; i < operands.size(); i++) in[i] = nodes[operands[i]].immediate;
  const int64_t value = kFolds[op](in);
  const char type = op_info(op).types.back();
  if (type == 'f') return constant(as_double(value));
  return constant_int(type == 'i' ? static_cast<int32_t>(value) : value, type);
}

int ScoreGraph::simplified(int op, std::span<const int> in) {
  const auto op_is = [&]<class... Op>() { return ((op == number_of<Op>()) || ...); };
  if (op_is.operator()<Add>() || op_is.operator()<Sub>()) {
    if (is_float(in[1], 0)) return in[0];
    if (op_is.operator()<Add>() && is_float(in[0], 0)) return in[1];
  }
  if (op_is.operator()<AddInt>() || op_is.operator()<SubInt>()) {
    if (is_int(in[1], 0)) return in[0];
    if (op_is.operator()<AddInt>() && is_int(in[0], 0)) return in[1];
  }
  if (op_is.operator()<Mul>())
    for (int i = 0; i < 2; i++) {
      const int factor = in[i], other = in[1 - i];
      if (is_float(factor, 1)) return other;
      if (is_float(factor, -1)) return emit<Neg>({other});
      if (!is<Where>(factor)) continue;  // g * where(c, 1, 0): the form of the derivatives of where and maximum
      const std::span<const int> branch = operands(factor);
      if (is_float(branch[1], 1) && is_float(branch[2], 0)) return emit<Where>({branch[0], other, branch[2]});
      if (is_float(branch[1], 0) && is_float(branch[2], 1)) return emit<Where>({branch[0], branch[1], other});
    }
  // One more rounding in a sixth of the time. Not for positions or tables: 49 * (1 / 49) is below 1, and its
  // floor is different.
  if (op_is.operator()<Div>() && is_constant(in[1]) && nodes[in[0]].of_score) {
    const double inverse = 1 / float_value(in[1]);
    if (std::isnormal(inverse) && std::fabs(inverse) < 1e30 && std::fabs(inverse) > 1e-30)
      return emit<Mul>({in[0], constant(inverse)});
  }
  if (op_is.operator()<MulInt>())
    for (int i = 0; i < 2; i++)
      if (is_int(in[i], 1)) return in[1 - i];
  if (op_is.operator()<FloorDivideInt>() && is<IntConst>(in[1]) && is_power_of_two(nodes[in[1]].immediate))
    return emit<ShiftRight>({in[0], constant_int(std::countr_zero(static_cast<uint64_t>(nodes[in[1]].immediate)))});
  if (op_is.operator()<RemainderInt>() && is<IntConst>(in[1]) && is_power_of_two(nodes[in[1]].immediate))
    return emit<AndInt>({in[0], constant_int(nodes[in[1]].immediate - 1)});
  if (op_is.operator()<And>() || op_is.operator()<Or>())
    for (int i = 0; i < 2; i++)
      if (is<BoolConst>(in[i])) return (nodes[in[i]].immediate != 0) == op_is.operator()<And>() ? in[1 - i] : in[i];
  if (op_is.operator()<Where, WhereInt, WhereBool>()) {
    if (is<BoolConst>(in[0])) return nodes[in[0]].immediate ? in[1] : in[2];
    if (in[1] == in[2]) return in[1];
  }
  return -1;
}

int ScoreGraph::emit(int op, std::span<const int> operands) {
  bool constants = true;
  for (int operand : operands) constants &= is_constant(operand);
  if (constants) return fold(op, operands);
  if (const int equal = simplified(op, operands); equal >= 0) return equal;
  ScoreNode node{.op = op, .type = op_info(op).types.back()};
  for (int operand : operands)
    node.operands[node.operand_count++] = operand, node.rate = join(node.rate, nodes[operand].rate);
  return add(node);
}

int ScoreGraph::copy_of(const ScoreNode& node, std::span<const int> operands) {
  if (node.op == number_of<Gather>()) return gather(node.immediate, operands);
  if (operands.empty()) return add(node);
  return emit(node.op, operands);
}

std::vector<Affine> affine_forms(const ScoreGraph& graph) {
  constexpr int64_t kMaxGrowth = int64_t{1} << 40;  // exceeds any tensor; products of constants would overflow int64
  std::vector<Affine> forms(graph.nodes.size());
  for (std::size_t i = 0; i < forms.size(); i++) {
    const ScoreNode& node = graph.nodes[i];
    if (node.type != 'i') continue;
    const auto form = [&](int operand) { return forms[node.operands[operand]]; };
    const auto combined = [&](int64_t sign) {
      return Affine{form(0).valid && form(1).valid, form(0).q + sign * form(1).q, form(0).k + sign * form(1).k};
    };
    if (node.rate <= Rate::head) forms[i] = {true, 0, 0};
    else if (node.op == number_of<Q>()) forms[i] = {true, 1, 0};
    else if (node.op == number_of<K>()) forms[i] = {true, 0, 1};
    else if (node.op == number_of<KMinusQ>()) forms[i] = {true, -1, 1};
    else if (node.op == number_of<AddInt>()) forms[i] = combined(1);
    else if (node.op == number_of<SubInt>()) forms[i] = combined(-1);
    else if (node.op == number_of<NegInt>()) forms[i] = {form(0).valid, -form(0).q, -form(0).k};
    else if (node.op == number_of<MulInt>())
      for (int factor = 0; factor < 2; factor++)
        if (graph.is<IntConst>(node.operands[factor])) {
          const int64_t by = graph.nodes[node.operands[factor]].immediate;
          const Affine& of = form(1 - factor);
          const bool fits = std::abs(of.q) <= INT32_MAX && std::abs(of.k) <= INT32_MAX;  // so does `by`
          forms[i] = fits ? Affine{of.valid, by * of.q, by * of.k} : Affine{};
        }
    if (std::abs(forms[i].q) > kMaxGrowth || std::abs(forms[i].k) > kMaxGrowth) forms[i] = {};
  }
  return forms;
}

ScoreGraph with_diagonals(const ScoreGraph& graph, std::span<int> outputs) {
  const std::vector<Affine> forms = affine_forms(graph);
  ScoreGraph result;
  result.captured = graph.captured;
  // Each value twice: as it is, and (affine ones) with q = 0 and k = k - q, which is equal if it depends on k
  // - q alone.
  std::vector<int> plain(graph.nodes.size()), shifted(graph.nodes.size(), -1);
  const auto is_diagonal = [](int64_t q, int64_t k) { return q == -k && k != 0; };
  const auto compares = [](const ScoreNode& node) {
    return node.op == number_of<LessInt>() || node.op == number_of<LessEqualInt>() ||
           node.op == number_of<EqualInt>() || node.op == number_of<NotEqualInt>();
  };
  for (std::size_t i = 0; i < graph.nodes.size(); i++) {
    const ScoreNode& node = graph.nodes[i];
    std::array<int, kMaxOperands> operands{}, shifted_operands{};
    bool diagonal = forms[i].valid && is_diagonal(forms[i].q, forms[i].k);
    if (compares(node)) {
      const Affine a = forms[node.operands[0]], b = forms[node.operands[1]];
      diagonal = a.valid && b.valid && is_diagonal(a.q - b.q, a.k - b.k);
    }
    for (int j = 0; j < node.operand_count; j++)
      operands[j] = plain[node.operands[j]], shifted_operands[j] = shifted[node.operands[j]];
    const std::span<const int> here(operands.data(), node.operand_count),
        there(shifted_operands.data(), node.operand_count);
    if (forms[i].valid) {
      if (node.op == number_of<Q>()) shifted[i] = result.constant_int(0);
      else if (node.op == number_of<K>()) shifted[i] = result.leaf(number_of<KMinusQ>());
      else if (node.rate <= Rate::head) shifted[i] = result.copy_of(node, here);
      else shifted[i] = result.copy_of(node, there);
    }
    plain[i] = !diagonal ? result.copy_of(node, here) : forms[i].valid ? shifted[i] : result.copy_of(node, there);
  }
  for (int& output : outputs) output = plain[output];
  return result;
}

}  // namespace lowbit
