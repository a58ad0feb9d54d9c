// SPDX-License-Identifier: Apache-2.0
// Gradients of the tensors captured by a score_mod, computed by many threads, with the same bits for any number of
// them: the work is cut into slices that depend on the shapes alone, and one thread processes a slice, item by item.
// Small tensors have one accumulator per slice, added in slice order at the end. Large ones are accumulated in place,
// which is safe if their indices prove that slices write to disjoint elements (bias[b, h, q, k]).
#pragma once

#include <cstdint>
#include <vector>

#include "core/tensor_view.hpp"
#include "ops/score_program.hpp"

namespace lowbit::cpu {

// The number of items in the pass over queries: (b, heads h * heads_per_item .., queries q * q_tile ..).
struct ScoreGradientShape {
  int64_t batch = 1, head_items = 1, q_items = 1;
};

struct ScoreGradientItem {
  int64_t b, head, q;  // item indices
};

struct LOWBIT_API ScoreGradientPlan {
 public:
  // `gradients`: the result for each captured tensor, contiguous, its shape and dtype, or an empty view. `real`:
  // float32, or float64 for float64 queries.
  ScoreGradientPlan(const ScoreCall& call, const ScoreGradientShape& shape, std::vector<TensorView> gradients,
                    DType real);

  int64_t slices() const { return slices_; }
  int64_t items(int64_t slice) const;
  ScoreGradientItem item(int64_t slice, int64_t number) const;
  const CapturedGradient* targets(int64_t slice) const {
    return targets_.data() + slice * static_cast<int64_t>(gradients_.size());
  }
  void finish();  // writes the gradients

 private:
  ScoreGradientShape shape_;
  std::vector<TensorView> gradients_;
  DType real_;
  bool apart_[3] = {};  // per axis (batch, head, q): whether slices are cut along it
  int64_t slices_ = 1, cuts_ = 1;  // cuts_: combinations along the axes that are cut
  // Accumulators per tensor, slice by slice; none if the gradient is accumulated in place.
  std::vector<std::vector<double>> sums_;
  std::vector<CapturedGradient> targets_;
};

}  // namespace lowbit::cpu
