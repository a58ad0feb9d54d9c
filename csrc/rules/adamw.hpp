// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101), as torch computes them:
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2
//   p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// amsgrad divides by the largest v so far. In units of (1 - beta1) / gain and (1 - beta2) / gain^2, a new moment is one
// FMA of gain * g; the learning rate is folded into the divisor, so that the new parameter is one FMA too. One division
// and one square root per element, both exact. The gain is the largest power of two with which neither moment overflows
// before torch's does: g^2 alone is inf from 1.8e19 on, (1 - beta2) g^2 from 5.8e20 on.
#pragma once

#include <cfloat>
#include <cmath>

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

struct AdamW {
  static constexpr Moment moments[] = {
      {"exp_avg", true}, {"exp_avg_sq", false}, {"max_exp_avg_sq", false, HyperField::amsgrad}};
  static constexpr HyperField reads[] = {HyperField::beta1, HyperField::beta2, HyperField::eps, HyperField::amsgrad};
  template <int kCount> struct Step;
};

template <int kCount>
struct AdamW::Step : RuleStep<AdamW, kCount> {
  float unit[3], carry[3];  // new moment / unit = old moment * carry + ...
  float gain, root_gain, root_eps;

  LOWBIT_INLINE Step(const Hyper& hyper, double step) {
    const double power = gain_within(1 - hyper.beta1, 1 - hyper.beta2), unit1 = (1 - hyper.beta1) / power,
                 unit2 = (1 - hyper.beta2) / (power * power),
                 rate = -hyper.lr / (1 - std::pow(hyper.beta1, step)) * unit1;
    gain = static_cast<float>(power);
    unit[0] = static_cast<float>(unit1), unit[1] = unit[2] = static_cast<float>(unit2);
    carry[0] = static_cast<float>(hyper.beta1 / unit1), carry[1] = static_cast<float>(hyper.beta2 / unit2),
    carry[2] = static_cast<float>(1 / unit2);
    const auto finite = [](double a) { return static_cast<float>(std::fmin(std::fmax(a, -FLT_MAX), FLT_MAX)); };
    root_gain = finite(std::sqrt(unit2 / (1 - std::pow(hyper.beta2, step))) / rate);
    root_eps = rate == 0 ? -__builtin_inff()
                         : finite(hyper.eps / rate);  // lr = 0: m / -inf; the gain is finite, for roots of 0
  }

  template <class Float>
  LOWBIT_INLINE Float update(Float p, Float keep, Float g, Float* moment, const Float* factor) const {
    Float& m = moment[0];
    Float& v = moment[1];
    g = mul(g, like(g, gain));
    m = fma(m, factor[0], g);
    v = fma(g, g, mul(v, factor[1]));
    Float divisor = v;
    if constexpr (kCount == 3) divisor = moment[2] = max(mul(moment[2], factor[2]), v);  // v if it is nan
    return fma(p, keep, div(m, fma(sqrt(divisor), like(g, root_gain), like(g, root_eps))));
  }
};

}  // namespace lowbit
