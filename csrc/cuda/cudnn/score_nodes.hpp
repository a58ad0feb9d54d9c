// SPDX-License-Identifier: Apache-2.0
// A score_mod as the pointwise nodes of a graph of cuDNN. Integers are floats there, which they are exactly up to 2^24;
// captured tensors are read where a score stands, so that they broadcast: t[h], t[b, q], t[q, k] ... Of cuDNN 9.19: a
// node's first operand must be what another node made (we add a zero to what is not), no scalar is an integer, and no
// floats are compared.
#pragma once

#include <array>
#include <compare>
#include <string_view>
#include <vector>

#include "core/dtype.hpp"
#include "core/error.hpp"

namespace lowbit {
struct ScoreCall;
}

namespace lowbit::cuda {

// Operands are numbers of nodes before.
enum class Pointwise : int {
  score, gradient,  // what the mod is given; the gradient of what it returns
  constant,         // `value`
  tensor,           // number `which`
  index,            // of axis `which` of [batch, heads, queries, keys], as float
  add, sub, mul, div, pow, neg, abs, floor, ceil, sqrt, rsqrt, exp, log, sin, cos, tan, tanh, sigmoid, erf
};

struct PointwiseNode {
  Pointwise what = Pointwise::score;
  std::array<int, 2> from{-1, -1};
  float value = 0;
  int which = 0;
  friend auto operator<=>(const PointwiseNode&, const PointwiseNode&) = default;
};

// A captured tensor as [batch, heads, queries, keys]: 1 where it does not vary.
struct BroadcastTensor {
  int captured = 0;
  DType dtype = DType::other;
  std::array<int64_t, 4> size{}, stride{};
  friend auto operator<=>(const BroadcastTensor&, const BroadcastTensor&) = default;
};

struct ScoreNodes {
  std::vector<PointwiseNode> nodes;
  std::vector<BroadcastTensor> tensors;
  int modified = -1;  // the node that is the result, or none: there is no mod
  int gradient = -1;  // the node that is the gradient of the score, of a backward; behind `modified`
  friend auto operator<=>(const ScoreNodes&, const ScoreNodes&) = default;
};

// Into `to`; returns why not, or nothing. Extents are those of [batch, heads, queries, keys].
LOWBIT_API std::string_view make_score_nodes(const ScoreCall& mod, const std::array<int64_t, 4>& extents, bool backward,
                                             ScoreNodes& to);

}  // namespace lowbit::cuda
