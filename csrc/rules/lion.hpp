// SPDX-License-Identifier: Apache-2.0
// Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, arXiv 2302.06675):
//   p -= lr sign(beta1 m + (1 - beta1) g);  m = beta2 m + (1 - beta2) g
#pragma once

#include "core/dtype.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

struct Lion {
  static constexpr int kMoments = 1;
  static constexpr bool kSigned[] = {true};

  float rate, gain1, gain2;

  LOWBIT_INLINE Lion(const Hyper& hyper, double)
      : rate(static_cast<float>(-hyper.lr)), gain1(static_cast<float>(1 - hyper.beta1)), gain2(static_cast<float>(1 - hyper.beta2)) {}

  template <class Float>
  LOWBIT_INLINE Float update(Float p, Float g, Float* moment) const {
    Float& m = moment[0];
    const Float change = sub(g, m), direction = fma(change, like(g, gain1), m);
    m = fma(change, like(g, gain2), m);
    return add(p, mul(like(g, rate), sign(direction)));
  }
};

}  // namespace lowbit
