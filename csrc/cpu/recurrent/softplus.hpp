// SPDX-License-Identifier: Apache-2.0
// softplus, which makes steps of time and decays of what a layer projects.
#pragma once

#include "cpu/simd/math.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// max(x, 0) + log(1 + e) with e = exp(-|x|), and log(1 + e) = 2 atanh(z) with z = e / (2 + e), whose square is at most
// 1/9: seven terms of the series leave a relative error of 1e-8.
LOWBIT_INLINE f32x16 softplus(f32x16 x) {
  const f32x16 e = exp(sub(set1(0.0f), abs(x))), z = div(e, add(e, set1(2.0f))), square = mul(z, z);
  f32x16 p = set1(1.0f / 15);
  p = fma(p, square, set1(1.0f / 13));
  p = fma(p, square, set1(1.0f / 11));
  p = fma(p, square, set1(1.0f / 9));
  p = fma(p, square, set1(1.0f / 7));
  p = fma(p, square, set1(1.0f / 5));
  p = fma(p, square, set1(1.0f / 3));
  p = fma(p, square, set1(1.0f));
  return fma(add(z, z), p, relu(x));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
