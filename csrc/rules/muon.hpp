// SPDX-License-Identifier: Apache-2.0
// The momentum of Muon (Jordan et al., 2024), as torch.optim.Muon computes it:
//   b = momentum b + (1 - momentum) g
// The result is not a new parameter but the direction of the step, b or, with Nesterov, momentum b + (1 - momentum) g.
// The caller orthogonalizes it, which takes products of matrices, and then takes a step of Sgd with it.
#pragma once

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

struct Muon {
  static constexpr Moment moments[] = {{"momentum_buffer", true}};
  static constexpr HyperField reads[] = {HyperField::momentum, HyperField::nesterov};
  template <int kCount> struct Step;
};

template <int kCount>
struct Muon::Step : RuleStep<Muon, kCount> {
  float unit[1], carry[1];
  float momentum, gain;
  bool nesterov;

  LOWBIT_INLINE Step(const Hyper& hyper, double)
      : unit{1.0f}, carry{static_cast<float>(hyper.momentum)}, momentum(static_cast<float>(hyper.momentum)),
        gain(static_cast<float>(1 - hyper.momentum)), nesterov(hyper.nesterov) {}

  template <class Float>
  LOWBIT_INLINE Float update(Float, Float, Float g, Float* moment, const Float* factor) const {
    Float& b = moment[0];
    g = mul(g, like(g, gain));
    b = fma(b, factor[0], g);
    return nesterov ? fma(b, like(g, momentum), g) : b;
  }
};

}  // namespace lowbit
