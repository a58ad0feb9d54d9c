// SPDX-License-Identifier: Apache-2.0
// The hyperparameters that update rules read, and the members of a rule.
//
// A rule (adamw.hpp ...; list.hpp is their list) is a struct with
//   moments   the moments of an element, in order; bindings, Python and state dicts take the names from here
//   reads     its own fields of Hyper. lr, weight_decay, decoupled and maximize are handled for every rule.
//   Step<n>   the rule with its first n moments: constants computed from (hyper, step), and
// p' = update(p, keep, g, moment, factor) of an element's parameter, gradient and moments; p * keep is p after weight
// decay. The caller passes old moments as two numbers, moment * factor = old * carry (so that a scale, or a table of
// values, costs no product of its own), and takes the new ones from `moment`, divided by `unit`.
#pragma once

#include <string_view>

#include "core/bits.hpp"

namespace lowbit {

// The numbers that a user sets for all tensors of a call; any rule may read any of them. decoupled: weight decay
// shrinks the parameter (AdamW, Lion); else it is added to the gradient (Adam, SGD).
#define LOWBIT_HYPER(X)   \
  X(double, lr)           \
  X(double, beta1)        \
  X(double, beta2)        \
  X(double, eps)          \
  X(double, weight_decay) \
  X(bool, decoupled)      \
  X(bool, maximize)       \
  X(bool, amsgrad)        \
  X(bool, nesterov)       \
  X(double, momentum)     \
  X(double, dampening)

#define LOWBIT_HYPER_FIELD(Type, name) Type name = {};
struct Hyper { LOWBIT_HYPER(LOWBIT_HYPER_FIELD) };
#undef LOWBIT_HYPER_FIELD

#define LOWBIT_HYPER_FIELD(Type, name) name,
enum class HyperField : int { LOWBIT_HYPER(LOWBIT_HYPER_FIELD) none };
#undef LOWBIT_HYPER_FIELD

#define LOWBIT_HYPER_FIELD(Type, name) #name,
inline constexpr std::string_view kHyperNames[] = {LOWBIT_HYPER(LOWBIT_HYPER_FIELD)};
#undef LOWBIT_HYPER_FIELD

struct Moment {
  std::string_view name;
  bool is_signed;                      // can be negative, which chooses its map
  HyperField needs = HyperField::none;  // kept only if this number is not 0; such moments come last
};

// The largest power of two that is at most `first`, and whose square is at most `second`; both are in (0, 1].
// Multiplying a gradient by it loses no bits, and its moments, in units scaled by the same factor, do not overflow
// unless they would anyway.
LOWBIT_INLINE double gain_within(double first, double second) {
  double power = 1;
  while (power > first || power * power > second) power *= 0.5;
  return power;
}

// Base class of Rule::Step<count>.
template <class Rule, int kCount>
struct RuleStep {
  static constexpr int kMoments = kCount;
  template <int k>
  static constexpr bool kSigned = Rule::moments[k].is_signed;
};

}  // namespace lowbit
