// SPDX-License-Identifier: Apache-2.0
// The nodes of a score_mod (score_nodes.hpp) in cudnn-frontend's words, for plan.cpp alone. The frontend asks for them
// while it builds the graph of attention: first for what the mod makes of a score, then for the gradient.
#pragma once

#include <cudnn_frontend.h>

#include <limits>

#include "cuda/cudnn/score_nodes.hpp"

namespace lowbit::cuda {

class ScoreGraphOf {
  using Graph = cudnn_frontend::graph::Graph;
  using Attributes = cudnn_frontend::graph::Pointwise_attributes;
  using Mode = cudnn_frontend::PointwiseMode_t;
  using Type = cudnn_frontend::DataType_t;
  using Tensor = std::shared_ptr<cudnn_frontend::graph::Tensor_attributes>;

 public:
  explicit ScoreGraphOf(const ScoreNodes& score) : score_(score), values_(score.nodes.size()) {}

  std::vector<Tensor> tensors;

  Tensor modified(Graph& graph, const Tensor& score, bool causal) {
    score_of_ = score;
    emit(graph, 0, score_.modified + 1);
    const Tensor value = values_[static_cast<std::size_t>(score_.modified)];
    return causal ? without_later_keys(graph, value) : value;
  }
  Tensor differentiated(Graph& graph, const Tensor& gradient) {
    gradient_of_ = gradient;
    emit(graph, score_.modified + 1, static_cast<int>(score_.nodes.size()));
    return values_[static_cast<std::size_t>(score_.gradient)];
  }

 private:
  static Mode mode_of(Pointwise what) {
    switch (what) {
      case Pointwise::add: return Mode::ADD;
      case Pointwise::sub: return Mode::SUB;
      case Pointwise::mul: return Mode::MUL;
      case Pointwise::div: return Mode::DIV;
      case Pointwise::pow: return Mode::POW;
      case Pointwise::neg: return Mode::NEG;
      case Pointwise::abs: return Mode::ABS;
      case Pointwise::floor: return Mode::FLOOR;
      case Pointwise::ceil: return Mode::CEIL;
      case Pointwise::sqrt: return Mode::SQRT;
      case Pointwise::rsqrt: return Mode::RSQRT;
      case Pointwise::exp: return Mode::EXP;
      case Pointwise::log: return Mode::LOG;
      case Pointwise::sin: return Mode::SIN;
      case Pointwise::cos: return Mode::COS;
      case Pointwise::tan: return Mode::TAN;
      case Pointwise::tanh: return Mode::TANH_FWD;
      case Pointwise::sigmoid: return Mode::SIGMOID_FWD;
      case Pointwise::erf: return Mode::ERF;
      default: return Mode::NOT_SET;
    }
  }
  static Tensor typed(const Tensor& tensor, Type type) { return tensor->set_data_type(type), tensor; }
  static Attributes attributes(Mode mode, Type type) { return Attributes().set_mode(mode).set_compute_data_type(type); }
  Tensor index(Graph& graph, int axis) const {
    return typed(graph.pointwise(score_of_, attributes(Mode::GEN_INDEX, Type::INT32).set_axis(axis)), Type::INT32);
  }
  Tensor without_later_keys(Graph& graph, const Tensor& score) const {
    const Tensor seen = typed(graph.pointwise(index(graph, 2), index(graph, 3),
                                              attributes(Mode::CMP_GE, Type::BOOLEAN)), Type::BOOLEAN);
    const auto hidden =
        std::make_shared<cudnn_frontend::graph::Tensor_attributes>(-std::numeric_limits<float>::infinity());
    return typed(graph.pointwise(score, hidden, seen, attributes(Mode::BINARY_SELECT, Type::FLOAT)), Type::FLOAT);
  }

  void emit(Graph& graph, int begin, int end) {
    for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); i++)
      values_[i] = value(graph, score_.nodes[i]);
  }
  Tensor value(Graph& graph, const PointwiseNode& node) {
    const auto from = [&](std::size_t i) { return values_[static_cast<std::size_t>(node.from[i])]; };
    switch (node.what) {
      case Pointwise::score: return score_of_;
      case Pointwise::gradient: return gradient_of_;
      case Pointwise::constant: return std::make_shared<cudnn_frontend::graph::Tensor_attributes>(node.value);
      case Pointwise::tensor: return tensors[static_cast<std::size_t>(node.which)];
      case Pointwise::index:
        return typed(graph.pointwise(index(graph, node.which), attributes(Mode::IDENTITY, Type::FLOAT)), Type::FLOAT);
      default: break;
    }
    const Attributes how = attributes(mode_of(node.what), Type::FLOAT);
    const Tensor made = node.from[1] < 0 ? graph.pointwise(from(0), how) : graph.pointwise(from(0), from(1), how);
    return typed(made, Type::FLOAT);
  }

  ScoreNodes score_;
  std::vector<Tensor> values_;
  Tensor score_of_, gradient_of_;
};

}  // namespace lowbit::cuda
