// SPDX-License-Identifier: Apache-2.0
// The derivatives of sigmoid and silu. With e = exp(-x) and s = 1 / (1 + e), 1 - s is e s, since the difference would
// cancel.
#pragma once

#include "cpu/simd/math.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Slope {
  f32x16 value, slope;
};

LOWBIT_INLINE Slope sigmoid_and_slope(f32x16 x) {
  const f32x16 e = exp(sub(set1(0.0f), x)), s = div(set1(1.0f), add(set1(1.0f), e));
  return {s, mul(s, mul(e, s))};
}

LOWBIT_INLINE Slope silu_and_slope(f32x16 x) {
  const f32x16 e = exp(sub(set1(0.0f), x)), s = div(set1(1.0f), add(set1(1.0f), e));
  return {mul(x, s), mul(s, fma(x, mul(e, s), set1(1.0f)))};
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
