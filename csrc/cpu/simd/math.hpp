// SPDX-License-Identifier: Apache-2.0
// exp, tanh, erf and the activations over the vector of 16 columns: the same operations, and so the same bits, on every
// instruction set. Include after a header of cpu/simd/.
#pragma once

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// For templates over the vector type in folders without an ISA (formats, rules): a vector of the first argument's type
// with all lanes `a`.
LOWBIT_INLINE f32x16 like(f32x16, float a) { return set1(a); }
LOWBIT_INLINE i32x16 like(i32x16, int32_t a) { return set1(a); }

// exp(x) = 2^i * e^r with |r| <= ln2 / 2; a polynomial of degree 6 for e^r, relative error 2e-7 where the
// result is normal.
LOWBIT_INLINE f32x16 exp(f32x16 x) {
  x = max(set1(-87.0f), min(set1(88.0f), x));  // this operand order keeps nan
  const i32x16 i = to_int(mul(x, set1(1.44269504f)));
  const f32x16 n = to_float(i);
  f32x16 r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  f32x16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, mul(r, r), add(r, set1(1.0f)));
  return times_power_of_two(p, i);
}

LOWBIT_INLINE f32x16 sigmoid(f32x16 x) { return div(set1(1.0f), add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

// tanh(x) = x * P(x^2) / Q(x^2) for |x| < 0.625 would save an exp, but cost a select; (1 - e) / (1 + e) with e =
// exp(-2|x|) loses relative accuracy only near 0, where every use here multiplies by x or adds 1.
LOWBIT_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 e = exp(mul(abs(x), set1(-2.0f)));
  return copysign(div(sub(set1(1.0f), e), add(set1(1.0f), e)), x);
}

// Abramowitz and Stegun 7.1.26: absolute error 1.5e-7.
LOWBIT_INLINE f32x16 erf(f32x16 x) {
  const f32x16 a = abs(x), t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
  f32x16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  const f32x16 tail = mul(mul(p, t), exp(mul(a, sub(set1(0.0f), a))));
  return copysign(sub(set1(1.0f), tail), x);
}

LOWBIT_INLINE f32x16 sign(f32x16 x) {  // -1, 1, or x if it is 0 or nan
  return float_of(select(at_least(abs(x), set1(0x1p-149f)), bits_of(copysign(set1(1.0f), x)), bits_of(x)));
}
LOWBIT_INLINE f32x16 relu(f32x16 x) { return max(set1(0.0f), x); }  // x if x is nan
LOWBIT_INLINE f32x16 silu(f32x16 x) { return mul(x, sigmoid(x)); }
LOWBIT_INLINE f32x16 gelu(f32x16 x) {
  const f32x16 half = mul(x, set1(0.5f));
  return fma(half, erf(mul(x, set1(0.70710678f))), half);
}
LOWBIT_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 half = mul(x, set1(0.5f)), cube = mul(mul(x, x), x);
  return fma(half, tanh(mul(set1(0.79788456f), fma(cube, set1(0.044715f), x))), half);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
