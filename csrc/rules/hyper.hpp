// SPDX-License-Identifier: Apache-2.0
// The list of update rules and the numbers that they read.
//
// A rule makes p' = update(p, keep, g, moment, factor) of an element's parameter, gradient and kMoments moments. What
// weight decay leaves of p is p * keep. The caller gives old moments as two numbers, moment * factor = old * carry (so
// that a scale, or a table of values, costs no product of its own), and takes back the new ones in `moment`, divided by
// `unit`.
#pragma once

#include <string_view>

namespace lowbit {

enum class Rule : int { adamw, sgd, lion };
inline constexpr std::string_view kRuleNames[] = {"adamw", "sgd", "lion"};

// What a user sets, for all tensors of a call. A rule reads what it knows.
struct Hyper {
  double lr = 0, beta1 = 0, beta2 = 0, eps = 0, weight_decay = 0;
  bool decoupled =
      false;  // weight decay shrinks the parameter (AdamW, Lion); else it is added to the gradient (Adam, SGD)
  bool maximize = false, amsgrad = false, nesterov = false;
  double momentum = 0, dampening = 0;
};

}  // namespace lowbit
