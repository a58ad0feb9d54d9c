// SPDX-License-Identifier: Apache-2.0
// A score program as a graph of values, each computed from earlier ones (SSA). Values know their type and their rate,
// the coordinate that they vary with inside a tile of scores. A value of a low rate is computed once instead of once
// per score:
//   constant < head (b, h) < row (q), column (k), diagonal (k - q) < tile
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "score/ops.hpp"

namespace lowbit {

enum class Rate : uint8_t { constant, head, row, column, diagonal, tile };
inline constexpr std::string_view kRateNames[] = {"constant", "head", "row", "column", "diagonal", "tile"};

inline Rate join(Rate a, Rate b) {
  if (a > b) std::swap(a, b);
  return a == b || a <= Rate::head ? b : Rate::tile;
}

inline constexpr int kMaxOperands = 9;  // a value and eight indices

struct ScoreNode {
  int op = 0;
  char type = 'f';  // f, i or b
  Rate rate = Rate::constant;
  bool of_score = false;  // depends on the score (or its gradient): not exact to the last bit anyway
  int operand_count = 0;
  std::array<int, kMaxOperands> operands{};
  // constant: value (float: bits of a double); gather, scatter_add: captured tensor; sum: rate of the result.
  int64_t immediate = 0;
};

struct CapturedType {
  char type;
  int rank;
};

// The layout of captured tensors is sizes, then strides, tensor by tensor: the offset of those of `tensor`.
inline int64_t layout_at(std::span<const CapturedType> captured, int64_t tensor) {
  int64_t at = 0;
  for (const CapturedType& before : captured.first(static_cast<std::size_t>(tensor))) at += 2 * before.rank;
  return at;
}

struct OpInfo {
  std::string_view name, types;
};
const OpInfo& op_info(int op);  // one per op, in the order of ScoreOps
int op_count();

class ScoreGraph {
 public:
  std::vector<ScoreNode> nodes;
  std::vector<CapturedType> captured;

  int constant(double value);
  int constant_int(int64_t value, char type = 'i');
  int leaf(int op);
  int gather(int64_t tensor, std::span<const int> indices);
  int scatter_add(int64_t tensor, int value, std::span<const int> indices);
  int sum(int value, Rate rate);  // the value itself if it has that rate
  int emit(int op, std::span<const int> operands);  // folds constants, drops ops without effect, reuses equal values
  template <class Op>
  int emit(std::initializer_list<int> operands) { return emit(number_of<Op>(), {operands.begin(), operands.size()}); }
  int copy_of(const ScoreNode& node, std::span<const int> operands);  // the same op on other operands

  template <class Op>
  bool is(int node) const { return nodes[node].op == number_of<Op>(); }
  bool is_constant(int node) const { return nodes[node].rate == Rate::constant; }
  bool is_float(int node, double value) const;
  bool is_int(int node, int64_t value) const;
  double float_value(int node) const;
  std::span<const int> operands(int node) const {
    return {nodes[node].operands.data(), static_cast<size_t>(nodes[node].operand_count)};
  }

 private:
  int add(const ScoreNode& node);
  int fold(int op, std::span<const int> operands);
  int simplified(int op, std::span<const int> operands);  // an equal value, or -1

  std::map<std::array<int64_t, kMaxOperands + 2>, int> known_;
};

// Int values of the form a q + b k + (a constant of the head): the coefficients, if the value has that form.
struct Affine {
  bool valid = false;
  int64_t q = 0, k = 0;
};
std::vector<Affine> affine_forms(const ScoreGraph& graph);

// The graph with every value that depends on q and k only through k - q rewritten in terms of k_minus_q, so that it has
// the rate of a diagonal. `outputs` are renumbered.
ScoreGraph with_diagonals(const ScoreGraph& graph, std::span<int> outputs);

// Reverse mode: adds to the graph the gradient with respect to the score (returns its number) and, if requested, one
// scatter_add per gather of a float tensor (appends their numbers). The gradient of the output is the leaf `gradient`.
int add_gradients(ScoreGraph& graph, int output, std::vector<int>* scatters);

}  // namespace lowbit
