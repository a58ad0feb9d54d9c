// SPDX-License-Identifier: Apache-2.0
// route: the experts of each token and their weights, from the logits of a router, in float32.
//
//   score  = softmax(logits), sigmoid(logits) or sqrt(softplus(logits));  choice = score + correction
//            or, if only the chosen logits are scored: choice = logits + correction
//   groups: choices outside the best groups become -inf, or 0; a group is rated by the sum of its largest choices
//   index  = the k largest choices, largest first; ties: lower index first
//   weight = score[index];  normalized: weight /= max(sum(weight) + eps, least);  weight *= scale * expert_scale[index]
//
// A token with a choice of nan gets nan weights and the indices 0 to k - 1. Scores below exp(-87) are 0.
//
// In a program the logits may be those of a router, x @ weight.T + bias. The product is one of float32 numbers, since
// two experts may be close.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

enum class Scoring : uint8_t { softmax, sigmoid, sqrt_softplus, softmax_of_chosen, sigmoid_of_chosen };
inline constexpr std::string_view kScoringNames[] = {"softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen",
                                                     "sigmoid_of_chosen"};

struct Router {
  TensorView x;         // [T, H] of the three dtypes, contiguous; or none: the logits are given
  TensorView weight;    // [E, H] of the three dtypes, contiguous
  TensorView bias;      // [E] of the three dtypes, contiguous; or none
  bool rounds = false;  // logits are rounded to the dtype of x, as a router does that computes in it
};

struct RouteArgs {
  Place place{};
  TensorView logits;      // [T, E] float32, bfloat16 or float16, contiguous; without data if there is a router
  Router router{};
  TensorView correction;  // [E] of the three dtypes, contiguous; or none
  int64_t k = 1;
  Scoring scoring = Scoring::softmax;
  int64_t groups = 1, groups_kept = 1;  // a group is E / groups consecutive experts
  int64_t group_top = 1;                // number of choices in a group's sum
  bool zero_outside = false;            // choices outside the kept groups become 0, else -inf
  bool normalize = false;
  double eps = 0, least = 0, scale = 1;
  TensorView expert_scale;  // [E] of the three dtypes, contiguous; or none
  TensorView weights{};     // [T, k] float32, contiguous: written
  TensorView index{};       // [T, k] int64, contiguous: written

  int64_t tokens() const { return logits.size(0); }
  int64_t experts() const { return logits.size(1); }
};

// Checks all arguments but the results. With a router, the logits get their shape here.
LOWBIT_API RouteArgs route_args(const RouteArgs& given, int64_t scoring);
LOWBIT_API Call describe(const RouteArgs& args);

}  // namespace lowbit
