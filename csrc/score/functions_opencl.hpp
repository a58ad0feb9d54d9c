// SPDX-License-Identifier: Apache-2.0
// On an Intel GPU the functions of score/math.hpp are OpenCL's. The translator to SPIR-V recognizes them by the names
// that C++ gives to functions outside a namespace.
#pragma once

#include "core/bits.hpp"

#define LOWBIT_OPENCL1(F) LOWBIT_LIBRARY1(F) F(sqrt) F(floor) F(exp) F(exp2) F(tanh)
#define LOWBIT_OPENCL2(F) LOWBIT_LIBRARY2(F) F(copysign)

#define LOWBIT_DECLARE1(name) __device__ float name(float a);
#define LOWBIT_DECLARE2(name) __device__ float name(float a, float b);
LOWBIT_OPENCL1(LOWBIT_DECLARE1)
LOWBIT_OPENCL2(LOWBIT_DECLARE2)
#undef LOWBIT_DECLARE1
#undef LOWBIT_DECLARE2

namespace lowbit {

#define LOWBIT_DEFINE1(name) LOWBIT_INLINE float name##_of(float a) { return ::name(a); }
#define LOWBIT_DEFINE2(name) LOWBIT_INLINE float name##_of(float a, float b) { return ::name(a, b); }
LOWBIT_OPENCL1(LOWBIT_DEFINE1)
LOWBIT_OPENCL2(LOWBIT_DEFINE2)
#undef LOWBIT_DEFINE1
#undef LOWBIT_DEFINE2
#undef LOWBIT_OPENCL1
#undef LOWBIT_OPENCL2

LOWBIT_INLINE float fma_of(float a, float b, float c) { return opencl_fma(a, b, c); }
LOWBIT_INLINE float round_of(float a) { return rintf(a); }

}  // namespace lowbit
