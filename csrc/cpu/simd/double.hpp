// SPDX-License-Identifier: Apache-2.0
// 16 doubles with the functions of scalar.hpp, in plain C++: kernels written for a vector of columns also run in
// float64, for gradient checks.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct f64x16 { double lane[16]; };

#define LOWBIT_LANES for (int i = 0; i < 16; i++)

LOWBIT_INLINE f64x16 set1(double a) { f64x16 r; LOWBIT_LANES r.lane[i] = a; return r; }
LOWBIT_INLINE f64x16 load(const double* p) { f64x16 r; std::memcpy(&r, p, 128); return r; }
LOWBIT_INLINE void store(double* p, f64x16 a) { std::memcpy(p, &a, 128); }
LOWBIT_INLINE f64x16 add(f64x16 a, f64x16 b) { LOWBIT_LANES a.lane[i] += b.lane[i]; return a; }
LOWBIT_INLINE f64x16 sub(f64x16 a, f64x16 b) { LOWBIT_LANES a.lane[i] -= b.lane[i]; return a; }
LOWBIT_INLINE f64x16 mul(f64x16 a, f64x16 b) { LOWBIT_LANES a.lane[i] *= b.lane[i]; return a; }
LOWBIT_INLINE f64x16 fma(f64x16 a, f64x16 b, f64x16 c) {
  LOWBIT_LANES a.lane[i] = a.lane[i] * b.lane[i] + c.lane[i];
  return a;
}
LOWBIT_INLINE f64x16 max(f64x16 a, f64x16 b) {
  LOWBIT_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE double largest(f64x16 a) {
  double m = a.lane[0];
  LOWBIT_LANES m = a.lane[i] > m ? a.lane[i] : m;
  return m;
}
LOWBIT_INLINE bool all_at_most(f64x16 a, f64x16 b) {
  bool all = true;
  LOWBIT_LANES all &= a.lane[i] <= b.lane[i];
  return all;
}
LOWBIT_INLINE double sum(f64x16 a) { double s = 0; LOWBIT_LANES s += a.lane[i]; return s; }
LOWBIT_INLINE void transpose_16x16(const double* from, int64_t from_stride, double* to, int64_t to_stride) {
  for (int j = 0; j < 16; j++) LOWBIT_LANES to[j * to_stride + i] = from[i * from_stride + j];
}

#undef LOWBIT_LANES

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
