// SPDX-License-Identifier: Apache-2.0
// The part of the C++ library used by the headers of formats, rules and core. NVRTC has none: it gets this text under
// the names of the standard headers.
#pragma once

#include "gpu/device/std.cuh"

#define LOWBIT_INLINE __forceinline__
#define LOWBIT_ALWAYS_INLINE __forceinline__
#define LOWBIT_NOINLINE LOWBIT_INLINE

using int64_t = long long;
using uint64_t = unsigned long long;

LOWBIT_INLINE float __builtin_inff() { return __int_as_float(0x7f800000); }
LOWBIT_INLINE float __builtin_nanf(const char*) { return __int_as_float(0x7fc00000); }
LOWBIT_INLINE float __builtin_fmaf(float a, float b, float c) { return __fmaf_rn(a, b, c); }

namespace std {

inline void* memcpy(void* to, const void* from, size_t bytes) { return ::memcpy(to, from, bytes); }
inline double fmin(double a, double b) { return ::fmin(a, b); }
inline double fmax(double a, double b) { return ::fmax(a, b); }
inline double sqrt(double a) { return ::sqrt(a); }

// Powers of step counts by squaring: 34 products for step 100,000, where CUDA's pow takes some 200
// operations in double.
inline double pow(double base, double exponent) {
  if (!(exponent >= 0 && exponent < 0x1p53)) return ::pow(base, exponent);
  auto left = static_cast<uint64_t>(exponent);
  if (static_cast<double>(left) != exponent) return ::pow(base, exponent);
  double power = 1;
  for (; left; left >>= 1, base *= base)
    if (left & 1) power *= base;
  return power;
}

}  // namespace std
