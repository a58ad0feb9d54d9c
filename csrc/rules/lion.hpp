// SPDX-License-Identifier: Apache-2.0
// Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675):
//   p -= lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
// m is counted in units of (1 - beta2) / gain, so that it overflows no earlier than necessary (adamw.hpp).
#pragma once

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

struct Lion {
  static constexpr Moment moments[] = {{"exp_avg", true}};
  static constexpr HyperField reads[] = {HyperField::beta1, HyperField::beta2};
  template <int kCount> struct Step;
};

template <int kCount>
struct Lion::Step : RuleStep<Lion, kCount> {
  float unit[1], carry[1];
  float gain, rate, beta2, lookahead;

  LOWBIT_INLINE Step(const Hyper& hyper, double)
      : rate(static_cast<float>(-hyper.lr)), beta2(static_cast<float>(hyper.beta2)) {
    const double power = gain_within(1 - hyper.beta2, 1), unit1 = (1 - hyper.beta2) / power;
    gain = static_cast<float>(power), unit[0] = static_cast<float>(unit1), carry[0] = static_cast<float>(1 / unit1);
    lookahead = static_cast<float>(hyper.beta1 * unit1 / (1 - hyper.beta1));
  }

  template <class Float>
  LOWBIT_INLINE Float update(Float p, Float keep, Float g, Float* moment, const Float* factor) const {
    const Float old = mul(moment[0], factor[0]), direction = fma(old, like(g, lookahead), g);
    moment[0] = fma(old, like(g, beta2), mul(g, like(g, gain)));
    return fma(p, keep, mul(like(g, rate), sign(direction)));
  }
};

}  // namespace lowbit
