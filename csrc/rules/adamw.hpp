// SPDX-License-Identifier: Apache-2.0
// Adam and AdamW (Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101), as torch computes them:
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  p -= lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// amsgrad divides by the largest v so far. One division and one square root an element, both exact.
#pragma once

#include <cmath>

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

template <bool kAmsgrad>
struct AdamW {
  static constexpr int kMoments = kAmsgrad ? 3 : 2;  // m, v, largest v
  static constexpr bool kSigned[] = {true, false, false};

  float keep1, keep2, gain2, rate, inverse_root2, eps;

  LOWBIT_INLINE AdamW(const Hyper& hyper, double step)
      : keep1(static_cast<float>(1 - hyper.beta1)), keep2(static_cast<float>(hyper.beta2)), gain2(static_cast<float>(1 - hyper.beta2)),
        rate(static_cast<float>(-hyper.lr / (1 - std::pow(hyper.beta1, step)))),
        inverse_root2(static_cast<float>(1 / std::sqrt(1 - std::pow(hyper.beta2, step)))), eps(static_cast<float>(hyper.eps)) {}

  template <class Float>
  LOWBIT_INLINE Float update(Float p, Float g, Float* moment) const {
    Float& m = moment[0];
    Float& v = moment[1];
    m = fma(sub(g, m), like(g, keep1), m);
    v = fma(mul(g, g), like(g, gain2), mul(v, like(g, keep2)));
    Float divisor = v;
    if constexpr (kAmsgrad) divisor = moment[2] = max(moment[2], v);  // v where it is nan
    const Float root = fma(sqrt(divisor), like(g, inverse_root2), like(g, eps));
    return fma(div(m, root), like(g, rate), p);
  }
};

}  // namespace lowbit
