// SPDX-License-Identifier: Apache-2.0
// route: the experts of each token and their weights, from the logits of a router, in float32.
//
//   score  = softmax(logits), sigmoid(logits) or sqrt(softplus(logits));  choice = score + correction
//            or, where the chosen logits alone are scored: choice = logits + correction
//   groups: choices outside of the best groups are -inf, or 0; a group is as good as the sum of its largest choices
//   index  = the k largest choices, largest first, of equal ones the first first
//   weight = score[index];  normalized: weight /= max(sum(weight) + eps, least);  weight *= scale * expert_scale[index]
//
// A token with a choice that is nan has the weights nan and the index 0 to k - 1. Scores below exp(-87) are 0.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

enum class Scoring : uint8_t { softmax, sigmoid, sqrt_softplus, softmax_of_chosen, sigmoid_of_chosen };
inline constexpr std::string_view kScoringNames[] = {"softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen",
                                                     "sigmoid_of_chosen"};

struct RouteArgs {
  Place place{};
  TensorView logits;      // [T, E] float32, bfloat16 or float16, contiguous
  TensorView correction;  // [E] of the three dtypes, contiguous; or none
  int64_t k = 1;
  Scoring scoring = Scoring::softmax;
  int64_t groups = 1, groups_kept = 1;  // groups are E / groups experts behind one another
  int64_t group_top = 1;                // choices that are summed
  bool zero_outside = false;            // choices of groups that are not kept are 0, else -inf
  bool normalize = false;
  double eps = 0, least = 0, scale = 1;
  TensorView expert_scale;  // [E] of the three dtypes, contiguous; or none
  TensorView weights{};     // [T, k] float32, contiguous: written
  TensorView index{};       // [T, k] int64, contiguous: written

  int64_t tokens() const { return logits.size(0); }
  int64_t experts() const { return logits.size(1); }
};

// All of the arguments but the results, checked.
LOWBIT_API RouteArgs route_args(const RouteArgs& given, int64_t scoring);
LOWBIT_API Call describe(const RouteArgs& args);

}  // namespace lowbit
