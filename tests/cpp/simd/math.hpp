// SPDX-License-Identifier: Apache-2.0
// Checks of cpu/simd/math.hpp against double arithmetic, and a number made of all bits of its results: it is the same
// on every instruction set, which tests/cpp/test_simd.py compares.
#pragma once

#include <numbers>

#include "cpu/simd/math.hpp"
#include "harness.hpp"

namespace {

// |f(x) - reference(x)| <= budget(x, reference(x)), or both are nan.
void approximates(Function<f32x16(f32x16)> f, double (*reference)(double), double (*budget)(double, double)) {
  report.checks(f.text);
  uint64_t digest = 14695981039346656037u;
  double worst = 0, at = 0;
  const auto check = [&](const Lanes<f32x16>& x) {
    const Lanes<f32x16> got = lanes_of(f.call(vector_of<f32x16>(x)));
    for (int i = 0; i < 16; i++) {
      const uint32_t bits = got[i] == got[i] ? std::bit_cast<uint32_t>(got[i]) : 0x7fc00000;
      digest = (digest ^ bits) * 1099511628211u;
      const double wanted = reference(static_cast<double>(x[i])), y = static_cast<double>(got[i]);
      if (y == wanted || (y != y && wanted != wanted)) continue;
      const double share = std::fabs(y - wanted) / budget(static_cast<double>(x[i]), wanted);
      if (!(share <= worst)) worst = share, at = static_cast<double>(x[i]);
      if (share <= 1 || !report.fails(f.text)) continue;
      std::printf("of %a it is %a, not %a: %g times the budget\n", static_cast<double>(x[i]), y, wanted, share);
    }
  };
  for_arguments<f32x16>(check);
  Lanes<f32x16> x;
  uint32_t bits = 0;
  for (int i = 0; i < 20000; i++) {  // floats of every magnitude
    for (float& lane : x) lane = std::bit_cast<float>(bits += 13421);
    check(x);
  }
  for (int i = 0; i < 6400; i++) {  // and of -100 .. 100, where most results are neither 0 nor 1
    for (int lane = 0; lane < 16; lane++) x[lane] = static_cast<float>(16 * i + lane) / 512 - 100;
    check(x);
  }
  std::printf("digest %s %016llx, %.2f of the budget at %g\n", f.text, static_cast<unsigned long long>(digest), worst,
              at);
}

constexpr double kEpsilon = 0x1p-23;
double clamped(double x) { return x != x ? x : std::fmin(std::fmax(x, -87.0), 88.0); }

void check_math() {
  approximates(FUNCTION(exp, f32x16(f32x16)), [](double x) { return std::exp(clamped(x)); },
               [](double, double y) { return 2e-7 * y; });
  // Down to 1 / (1 + e^88), with which silu goes on where x / (1 + e^-x) would be 0 or, of -inf, nan.
  approximates(FUNCTION(sigmoid, f32x16(f32x16)), [](double x) { return 1 / (1 + std::exp(clamped(-x))); },
               [](double, double y) { return 4e-7 * y + 0x1p-149; });
  approximates(FUNCTION(tanh, f32x16(f32x16)), [](double x) { return std::tanh(x); },
               [](double, double) { return 2 * kEpsilon; });
  approximates(FUNCTION(erf, f32x16(f32x16)), [](double x) { return std::erf(x); },
               [](double, double) { return 1.5e-7 + 4 * kEpsilon; });
  approximates(FUNCTION(sign, f32x16(f32x16)), [](double x) { return x > 0 ? 1.0 : x < 0 ? -1.0 : x; },
               [](double, double) { return 0.0; });
  approximates(FUNCTION(relu, f32x16(f32x16)), [](double x) { return x < 0 ? 0.0 : x; },
               [](double, double) { return 0.0; });
  approximates(FUNCTION(silu, f32x16(f32x16)), [](double x) { return x / (1 + std::exp(clamped(-x))); },
               [](double x, double y) { return 5e-7 * std::fabs(y) + 0x1p-149 * (1 + std::fabs(x)); });
  approximates(FUNCTION(gelu, f32x16(f32x16)), [](double x) { return x / 2 * (1 + std::erf(x * (std::numbers::sqrt2 / 2))); },
               [](double x, double) { return (1.5e-7 + 4 * kEpsilon) * std::fabs(x) + 0x1p-149; });
  approximates(FUNCTION(gelu_tanh, f32x16(f32x16)),
               [](double x) { return x / 2 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))); },
               [](double x, double) { return 4 * kEpsilon * std::fabs(x) + 0x1p-149; });
}

}  // namespace
