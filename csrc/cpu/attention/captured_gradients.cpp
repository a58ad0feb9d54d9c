// SPDX-License-Identifier: Apache-2.0
#include "cpu/attention/captured_gradients.hpp"

#include <algorithm>
#include <array>

#include "core/parallel.hpp"

namespace lowbit::cpu {
namespace {

using namespace score;

constexpr int64_t kMaxSlices = 32;
constexpr int64_t kSmall = 1 << 17;  // max elements of a small tensor: 32 accumulators of doubles are 32 MiB at most

using Axes = std::array<bool, 3>;  // batch, head, q

// The axes along which different items never write to the same element: every gather is indexed directly by b (h, q) in
// one and the same dimension.
Axes axes_apart(const ScoreGraph& graph, int64_t tensor, int rank) {
  constexpr int kLeaves[] = {number_of<B>(), number_of<H>(), number_of<Q>()};
  Axes apart{};
  for (int axis = 0; axis < 3; axis++)
    for (int dim = 0; dim < rank; dim++) {
      bool all = true;
      for (const ScoreNode& node : graph.nodes)
        if (node.op == number_of<score::Gather>() && node.immediate == tensor)
          all &= graph.nodes[node.operands[dim]].op == kLeaves[axis];
      apart[axis] |= all;
    }
  return apart;
}

void store(const TensorView& to, int64_t at, double value) {
  switch (to.dtype) {
    case DType::float32: to.as<float>()[at] = static_cast<float>(value); break;
    case DType::bfloat16: to.as<uint16_t>()[at] = bfloat16_from_float(static_cast<float>(value)); break;
    case DType::float16: to.as<uint16_t>()[at] = float16_from_float(static_cast<float>(value)); break;
    default: to.as<double>()[at] = value;
  }
}

void add_slices(const TensorView& to, const double* sums, int64_t slices) {
  constexpr int64_t kChunk = 1 << 14;
  const int64_t count = to.numel();
  parallel_for((count + kChunk - 1) / kChunk, count < 4 * kChunk ? 1 : num_threads(), [&](int64_t chunk) {
    for (int64_t i = chunk * kChunk; i < std::min(count, (chunk + 1) * kChunk); i++) {
      double total = 0;
      for (int64_t slice = 0; slice < slices; slice++) total += sums[slice * count + i];
      store(to, i, total);
    }
  });
}

}  // namespace

ScoreGradientPlan::ScoreGradientPlan(const ScoreCall& call, const ScoreGradientShape& shape,
                                     std::vector<TensorView> gradients, DType real)
    : shape_(shape), gradients_(std::move(gradients)), real_(real), sums_(gradients_.size()) {
  const ScoreGraph& graph = call.program().graph;
  const int64_t extents[] = {shape_.batch, shape_.head_items, shape_.q_items};
  std::vector<Axes> apart(gradients_.size());
  std::fill(std::begin(apart_), std::end(apart_), true);
  for (std::size_t i = 0; i < gradients_.size(); i++) {
    if (!gradients_[i]) continue;
    apart[i] = axes_apart(graph, static_cast<int64_t>(i), gradients_[i].rank);
    if (gradients_[i].numel() > kSmall)
      for (int axis = 0; axis < 3; axis++) apart_[axis] &= apart[i][axis];
  }
  for (int axis = 0; axis < 3; axis++)
    if (apart_[axis]) cuts_ *= extents[axis];
  slices_ = std::max<int64_t>(1, std::min(cuts_, kMaxSlices));

  targets_.resize(slices_ * gradients_.size());
  for (std::size_t i = 0; i < gradients_.size(); i++) {
    const TensorView& gradient = gradients_[i];
    if (!gradient) continue;
    bool direct = true;
    for (int axis = 0; axis < 3; axis++) direct &= !apart_[axis] || extents[axis] <= 1 || apart[i][axis];
    const bool in_place = direct && gradient.numel() > kSmall && gradient.dtype == real_;
    if (in_place) std::memset(gradient.data, 0, gradient.numel() * size_of(real_));
    else sums_[i].resize((direct ? 1 : slices_) * gradient.numel());
    for (int64_t slice = 0; slice < slices_; slice++)
      targets_[slice * gradients_.size() + i] = {
          .data = in_place ? gradient.data : sums_[i].data() + (direct ? 0 : slice * gradient.numel()),
          .wide = !in_place};
  }
}

int64_t ScoreGradientPlan::items(int64_t slice) const {
  const int64_t all = shape_.batch * shape_.head_items * shape_.q_items, per_cut = cuts_ ? all / cuts_ : 0;
  return ((slice + 1) * cuts_ / slices_ - slice * cuts_ / slices_) * per_cut;
}

ScoreGradientItem ScoreGradientPlan::item(int64_t slice, int64_t number) const {
  const int64_t extents[] = {shape_.batch, shape_.head_items, shape_.q_items};
  int64_t per_cut = 1;
  for (int axis = 0; axis < 3; axis++)
    if (!apart_[axis]) per_cut *= extents[axis];
  int64_t cut = slice * cuts_ / slices_ + number / per_cut, rest = number % per_cut, index[3];
  for (int axis = 2; axis >= 0; axis--) {  // q fastest: keeps the keys of a head in cache
    int64_t& from = apart_[axis] ? cut : rest;
    index[axis] = from % extents[axis], from /= extents[axis];
  }
  return {index[0], index[1], index[2]};
}

void ScoreGradientPlan::finish() {
  for (std::size_t i = 0; i < gradients_.size(); i++) {
    if (!sums_[i].empty())
      add_slices(gradients_[i], sums_[i].data(), static_cast<int64_t>(sums_[i].size()) / gradients_[i].numel());
  }
}

}  // namespace lowbit::cpu
