// SPDX-License-Identifier: Apache-2.0
// Reverse mode over a score program: gradients are further values of the same graph, so they are folded, hoisted and
// run like any other. The gradient of a value has the rate of the value: contributions of a higher rate are first
// summed over the tile. The steps after that (the derivative of a table look-up per diagonal, of a slope per head) then
// run once per row, column, diagonal or head.
#include <optional>
#include <utility>

#include "score/graph.hpp"

namespace lowbit {
namespace {

using namespace score;

// The operand of derivatives in score/ops.hpp: a value of the graph, or a number not yet in it.
class Expression {
 public:
  Expression(double number) : number_(number) {}
  Expression(ScoreGraph& graph, int node) : graph_(&graph), node_(node) {}

  ScoreGraph* graph() const { return graph_; }
  int in(ScoreGraph& graph) const { return graph_ ? node_ : graph.constant(number_); }

 private:
  ScoreGraph* graph_ = nullptr;
  int node_ = -1;
  double number_ = 0;
};

template <class Op, class... E>
Expression call(Expression first, E... rest) {
  ScoreGraph* graph = first.graph();
  ((graph = graph ? graph : Expression(rest).graph()), ...);
  if (!graph) __builtin_unreachable();  // a derivative of numbers alone is a number
  return {*graph, graph->emit<Op>({first.in(*graph), Expression(rest).in(*graph)...})};
}
Expression operator+(Expression a, Expression b) { return call<Add>(a, b); }
Expression operator-(Expression a, Expression b) { return call<Sub>(a, b); }
Expression operator*(Expression a, Expression b) { return call<Mul>(a, b); }
Expression operator/(Expression a, Expression b) { return call<Div>(a, b); }
Expression operator-(Expression a) { return call<Neg>(a); }
Expression operator<(Expression a, Expression b) { return call<Less>(a, b); }
Expression equal(Expression a, Expression b) { return call<Equal>(a, b); }
Expression where(Expression c, Expression a, Expression b) { return call<Where>(c, a, b); }

using Partials = std::array<std::optional<Expression>, 3>;  // one per operand; none: no gradient flows there

template <class Op>
Partials partials(ScoreGraph& graph, int node) {
  const auto at = [&](int operand) { return Expression(graph, graph.nodes[node].operands[operand]); };
  const Expression y(graph, node);
  if constexpr (requires { Op::derivative(y, y); }) {
    return {Op::derivative(at(0), y)};
  } else if constexpr (requires { Op::derivative(y, y, y); }) {
    const auto d = Op::derivative(at(0), at(1), y);
    return {d[0], d[1]};
  } else if constexpr (requires { Op::derivative(y, y, y, y); }) {
    const auto d = Op::derivative(at(0), at(1), at(2), y);
    return {std::nullopt, d[0], d[1]};
  }
  return {};
}

template <class... Ops>
constexpr auto all_partials(OpList<Ops...>) {
  return std::array<Partials (*)(ScoreGraph&, int), sizeof...(Ops)>{partials<Ops>...};
}
constexpr auto kPartials = all_partials(ScoreOps{});

}  // namespace

int add_gradients(ScoreGraph& graph, int output, std::vector<int>* scatters) {
  // The gradient accumulated for a value so far, by rate: contributions per head and per score cannot be added before
  // the latter are summed.
  std::vector<std::array<int, 6>> shares(output + 1, {-1, -1, -1, -1, -1, -1});
  const auto add_share = [&](int node, int share) {
    int& sum = shares[node][static_cast<int>(graph.nodes[share].rate)];
    sum = sum < 0 ? share : graph.emit<Add>({sum, share});
  };
  add_share(output, graph.leaf(number_of<Gradient>()));
  int of_score = -1;
  for (int node = output; node >= 0; node--) {
    const ScoreNode here = graph.nodes[node];  // a copy, as emit() moves the nodes
    if (here.type != 'f' || here.rate == Rate::constant) continue;
    int gradient = -1;
    for (int share : shares[node])
      if (share >= 0)
        gradient =
            gradient < 0 ? graph.sum(share, here.rate) : graph.emit<Add>({gradient, graph.sum(share, here.rate)});
    if (gradient < 0) continue;
    if (here.op == number_of<Score>()) of_score = gradient;
    if (here.op == number_of<score::Gather>()) {
      if (scatters)
        scatters->push_back(graph.scatter_add(here.immediate, gradient,
                                              {here.operands.data(), static_cast<std::size_t>(here.operand_count)}));
      continue;
    }
    if (here.operand_count == 0) continue;
    const Partials d = kPartials[here.op](graph, node);
    for (int i = 0; i < 3; i++)
      if (d[i] && !graph.is_constant(here.operands[i]))
        add_share(here.operands[i], graph.emit<Mul>({gradient, d[i]->in(graph)}));
  }
  return of_score >= 0 ? of_score : graph.constant(0.0);
}

}  // namespace lowbit
