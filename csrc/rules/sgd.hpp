// SPDX-License-Identifier: Apache-2.0
// Stochastic gradient descent with momentum, as in torch: b = momentum b + (1 - dampening) g, b = g in the first step;
// p -= lr b, or with Nesterov p -= lr (g + momentum b).
#pragma once

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

struct Sgd {
  static constexpr Moment moments[] = {{"momentum_buffer", true, HyperField::momentum}};
  static constexpr HyperField reads[] = {HyperField::momentum, HyperField::dampening, HyperField::nesterov};
  template <int kCount> struct Step;
};

template <int kCount>
struct Sgd::Step : RuleStep<Sgd, kCount> {
  float unit[1], carry[1];
  float rate, momentum, gain;
  bool nesterov;

  LOWBIT_INLINE Step(const Hyper& hyper, double step)
      : unit{1.0f}, carry{static_cast<float>(hyper.momentum)}, rate(static_cast<float>(-hyper.lr)),
        momentum(static_cast<float>(hyper.momentum)), gain(step <= 1 ? 1.0f : static_cast<float>(1 - hyper.dampening)),
        nesterov(hyper.nesterov) {}

  template <class Float>
  LOWBIT_INLINE Float update(Float p, Float keep, Float g, Float* moment, const Float* factor) const {
    p = mul(p, keep);
    if constexpr (kCount == 0) return fma(g, like(g, rate), p);
    Float& b = moment[0];
    b = fma(b, factor[0], mul(g, like(g, gain)));
    return fma(nesterov ? fma(b, like(g, momentum), g) : b, like(g, rate), p);
  }
};

}  // namespace lowbit
