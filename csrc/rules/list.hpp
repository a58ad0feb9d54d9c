// SPDX-License-Identifier: Apache-2.0
// The list of update rules. Numbers are those of programs compiled earlier: append, never reorder.
#pragma once

#include <iterator>

#include "rules/adamw.hpp"
#include "rules/lion.hpp"
#include "rules/muon.hpp"
#include "rules/sgd.hpp"

namespace lowbit {

#define LOWBIT_RULES(X) \
  X(adamw, AdamW)       \
  X(sgd, Sgd)           \
  X(lion, Lion)         \
  X(muon, Muon)         \
  /* append here */

#define LOWBIT_RULE(name, Type) name,
enum class Rule : int { LOWBIT_RULES(LOWBIT_RULE) };
#undef LOWBIT_RULE

#define LOWBIT_RULE(name, Type) #name,
inline constexpr std::string_view kRuleNames[] = {LOWBIT_RULES(LOWBIT_RULE)};
#undef LOWBIT_RULE

// Calls body.operator()<Type>() for a rule known at run time only.
template <class Body>
LOWBIT_INLINE constexpr auto with_rule(Rule rule, Body&& body) {
  switch (rule) {
#define LOWBIT_RULE(name, Type) \
  case Rule::name: return body.template operator()<Type>();
    LOWBIT_RULES(LOWBIT_RULE)
#undef LOWBIT_RULE
  }
  __builtin_unreachable();
}

template <class RuleType>
inline constexpr int kMaxMomentsOf = static_cast<int>(std::size(RuleType::moments));

// The maximum over all rules.
inline constexpr int kMaxMoments = [] {
#define LOWBIT_RULE(name, Type) kMaxMomentsOf<Type>,
  const int counts[] = {LOWBIT_RULES(LOWBIT_RULE)};
#undef LOWBIT_RULE
  int max = 0;
  for (const int count : counts) max = count > max ? count : max;
  return max;
}();

LOWBIT_INLINE constexpr bool is_set(const Hyper& hyper, HyperField field) {
  switch (field) {
#define LOWBIT_HYPER_FIELD(Type, name) \
  case HyperField::name: return hyper.name != 0;
    LOWBIT_HYPER(LOWBIT_HYPER_FIELD)
#undef LOWBIT_HYPER_FIELD
    case HyperField::none: return true;
  }
  __builtin_unreachable();
}

// The number of moments that a rule keeps with these hyperparameters; the minimum if none asks for more.
template <class RuleType>
LOWBIT_INLINE constexpr int moments_of(const Hyper& hyper) {
  int count = 0;
  for (const Moment& moment : RuleType::moments) count += is_set(hyper, moment.needs);
  return count;
}

}  // namespace lowbit
