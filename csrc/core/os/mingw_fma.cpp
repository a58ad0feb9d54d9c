// SPDX-License-Identifier: Apache-2.0
// fma and fmaf of C for mingw-w64, whose own round twice: the rows of `scalar` would have other bits than on other systems.
// The product is exact in the wider type, and the sum is rounded there to odd, so that the second rounding is the only one
// (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
#include <bit>

namespace {

template <class Number, class Wide, class Bits>
Number fused(Number a, Number b, Number c) {
  const Wide product = static_cast<Wide>(a) * b, sum = product + c;
  const Wide of_c = sum - product, error = (product - (sum - of_c)) + (c - of_c);
  Bits bits = std::bit_cast<Bits>(sum);
  if ((error > 0 || error < 0) && (bits & 1) == 0) bits += (error > 0) == (sum > 0) ? 1 : -1;
  return static_cast<Number>(std::bit_cast<Wide>(bits));
}

}  // namespace

extern "C" float fmaf(float a, float b, float c) { return fused<float, double, unsigned long long>(a, b, c); }
extern "C" double fma(double a, double b, double c) { return fused<double, __float128, unsigned __int128>(a, b, c); }
