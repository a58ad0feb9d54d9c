// SPDX-License-Identifier: Apache-2.0
// OpenCL functions on floats, and values of other lanes of a sub-group.
#pragma once

#include "core/dtype.hpp"

#define LOWBIT_INLINED __attribute__((always_inline))  // a lambda: its captures stay in registers

namespace lowbit::level_zero {

__device__ float opencl_exp2(float a) __asm__("_Z4exp2f");
__device__ float opencl_log(float a) __asm__("_Z3logf");
__device__ float opencl_fmax(float a, float b) __asm__("_Z4fmaxff");

LOWBIT_INLINE float power_of_2(float a) { return opencl_exp2(a); }
LOWBIT_INLINE float logarithm(float a) { return opencl_log(a); }
LOWBIT_INLINE float larger_of(float a, float b) { return opencl_fmax(a, b); }  // the other one if one is nan
LOWBIT_INLINE uint16_t half_of_float(float a) { return __builtin_bit_cast(uint16_t, static_cast<_Float16>(a)); }

LOWBIT_INLINE float shuffled(float value, int lane) { return opencl_shuffle(value, static_cast<uint32_t>(lane)); }
LOWBIT_INLINE float shuffled_xor(float value, int lanes) {
  return opencl_shuffle_xor(value, static_cast<uint32_t>(lanes));
}

// A barrier for local and global memory.
LOWBIT_INLINE void barrier_of_all_memory() { opencl_barrier(3); }

}  // namespace lowbit::level_zero
