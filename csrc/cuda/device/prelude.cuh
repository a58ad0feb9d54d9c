// SPDX-License-Identifier: Apache-2.0
// CUDA's definitions of the macros and functions that the device sources of csrc/gpu need: NVRTC gets this text first
// (runtime/nvrtc.cpp). Tests implement them on the host.
//
// A kernel takes one struct, in constant memory; the driver finds it by its name. At least two CTAs of 256 threads fit
// on a multiprocessor, with 128 registers per thread, or as many as the struct says (kCtas). The threads of a CTA share
// LOWBIT_SHARED(int32_t, sums, [8]); LOWBIT_DYNAMIC_SHARED(Type, shared) is the memory requested by the launch, for
// more than 48 KB.
#pragma once

#include "core/bits.hpp"

#ifdef __CUDACC_RTC__
#define LOWBIT_KERNEL(name, threads, Args) \
  extern "C" __global__ void __launch_bounds__(threads, lowbit::gpu::ctas_of<Args>()) \
  name(const __grid_constant__ Args args)
#define LOWBIT_SHARED(Type, name, extents) __shared__ alignas(16) alignas(Type) Type name extents
#define LOWBIT_DYNAMIC_SHARED(Type, name) \
  extern __shared__ __align__(1024) uint4 dynamic_shared[]; \
  auto& name = *reinterpret_cast<Type*>(dynamic_shared)

namespace lowbit::gpu {

template <class Args>
constexpr int ctas_of() {
  if constexpr (requires { Args::kCtas; }) return __CUDA_ARCH__ < 1000 ? Args::kCtas : 2;  // 80 registers spill there
  else return 2;
}

LOWBIT_INLINE float float_of_half(uint32_t bits) {  // the lower half
  float a;
  asm("{.reg .f16 h; .reg .b16 u; mov.b32 {h, u}, %1; cvt.f32.f16 %0, h;}" : "=f"(a) : "r"(bits));
  return a;
}

// Two floats, rounded to nearest even, packed.
LOWBIT_INLINE uint32_t pair_of_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
LOWBIT_INLINE uint32_t pair_of_f16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Ends the launch with an error, which the next synchronization reports: an argument in device memory is invalid.
LOWBIT_INLINE void fail() { asm volatile("trap;"); }

}  // namespace lowbit::gpu
#endif

namespace lowbit::gpu {}

namespace lowbit::cuda {

using namespace gpu;

}  // namespace lowbit::cuda
