// SPDX-License-Identifier: Apache-2.0
// The parts of CUDA C++ and of the C++ library used by device sources, for the clang that makes SPIR-V (tools/spirv),
// which includes this text first: CUDA's keywords and functions in terms of OpenCL functions, declared by their mangled
// names. Headers of the library are this file under their names.
#pragma once

#include "gpu/device/std.cuh"

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define LOWBIT_INLINE __device__ inline __attribute__((always_inline))
#define LOWBIT_ALWAYS_INLINE LOWBIT_INLINE
#define LOWBIT_NOINLINE LOWBIT_INLINE
#define LOWBIT_LAMBDA __attribute__((always_inline))  // follows the parameters of a lambda
#define LOWBIT_API
#define __forceinline__ inline __attribute__((always_inline))

// A kernel takes one struct by value. Every module defines LOWBIT_LANES, the size of its sub-groups, which tools/spirv
// requests from the device.
#if __clang_major__ < 19
#define LOWBIT_ASSUME(text) __attribute__((assume(text)))
#else
#define LOWBIT_ASSUME(text) [[omp::assume(text)]]
#endif
#define LOWBIT_TEXT_OF(value) #value
#define LOWBIT_TEXT(value) LOWBIT_TEXT_OF(value)
#define LOWBIT_KERNEL(name, threads, Args) \
  extern "C" LOWBIT_ASSUME("lowbit_lanes=" LOWBIT_TEXT(LOWBIT_LANES)) __global__ void name(const Args args)
#define LOWBIT_SHARED(Type, name, extents) __shared__ Type name extents __attribute__((aligned(16)))

using int64_t = long;
using uint64_t = unsigned long;

constexpr int64_t INT64_MIN = -0x7fffffffffffffff - 1;

namespace std {

template <class T>
constexpr const T& min(const T& a, const T& b) { return b < a ? b : a; }
template <class T>
constexpr const T& max(const T& a, const T& b) { return a < b ? b : a; }

template <class T> struct numeric_limits;
template <>
struct numeric_limits<double> {
  static constexpr double infinity() { return __builtin_inf(); }
  static constexpr double max() { return 0x1.fffffffffffffp1023; }
};

// Computed by the host: many of these GPUs have no double.
__device__ double pow(double base, double exponent);
__device__ double sqrt(double a);
__device__ double fmin(double a, double b);
__device__ double fmax(double a, double b);
__device__ double fabs(double a);
__device__ double floor(double a);
__device__ double trunc(double a);
__device__ double ldexp(double a, int32_t exponent);

LOWBIT_INLINE void* memcpy(void* to, const void* from, size_t bytes) { return __builtin_memcpy(to, from, bytes); }

}  // namespace std

using size_t = std::size_t;

#define LOWBIT_CONVERGENT __attribute__((device, convergent))

__device__ size_t opencl_local_id(uint32_t dimension) __asm__("_Z12get_local_idj");
__device__ uint32_t opencl_lane() __asm__("_Z22get_sub_group_local_idv");
__device__ size_t opencl_global_offset(uint32_t dimension) __asm__("_Z17get_global_offsetj");
__device__ size_t opencl_group_id(uint32_t dimension) __asm__("_Z12get_group_idj");
LOWBIT_CONVERGENT void opencl_barrier(uint32_t fence) __asm__("_Z7barrierj");
LOWBIT_CONVERGENT int32_t opencl_shuffle_xor(int32_t value, uint32_t lanes)
    __asm__("_Z27intel_sub_group_shuffle_xorij");
LOWBIT_CONVERGENT float opencl_shuffle_xor(float value, uint32_t lanes) __asm__("_Z27intel_sub_group_shuffle_xorfj");
LOWBIT_CONVERGENT float opencl_shuffle(float value, uint32_t lane) __asm__("_Z23intel_sub_group_shufflefj");
__device__ float opencl_fma(float a, float b, float c) __asm__("_Z3fmafff");
__device__ float opencl_sqrt(float a) __asm__("_Z4sqrtf");
__device__ float rintf(float a) __asm__("_Z4rintf");
__device__ float erfcf(float a) __asm__("_Z4erfcf");
__device__ float tanhf(float a) __asm__("_Z4tanhf");
__device__ float expf(float a) __asm__("_Z3expf");

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

struct ThreadIndex {
  struct X {
    LOWBIT_INLINE operator uint32_t() const { return static_cast<uint32_t>(opencl_local_id(0)); }
  } x;
};
struct GroupIndex {
  struct X {
    LOWBIT_INLINE operator int64_t() const { return static_cast<int64_t>(opencl_group_id(0)); }
  } x;
};
#define threadIdx ThreadIndex{}
#define blockIdx GroupIndex{}

// A count that compilers cannot see, so that a loop of that many iterations stays a loop.
LOWBIT_INLINE int times(int count) { return count + static_cast<int>(opencl_global_offset(0)); }

LOWBIT_INLINE void __syncthreads() { opencl_barrier(1); }  // local memory
LOWBIT_INLINE int32_t __shfl_xor_sync(uint32_t, int32_t value, int lanes) { return opencl_shuffle_xor(value, lanes); }
LOWBIT_INLINE float __shfl_xor_sync(uint32_t, float value, int lanes) { return opencl_shuffle_xor(value, lanes); }
LOWBIT_INLINE float __shfl_sync(uint32_t, float value, int lane, int width) {  // within groups of `width` lanes
  const uint32_t own = opencl_lane();
  return opencl_shuffle(value, own / width * width + static_cast<uint32_t>(lane) % width);
}

// Compiled without contraction; division and square root are rounded to nearest (requested by the host: runtime).
LOWBIT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
LOWBIT_INLINE float __fsqrt_rn(float a) { return opencl_sqrt(a); }
LOWBIT_INLINE float __fmaf_rn(float a, float b, float c) { return opencl_fma(a, b, c); }
LOWBIT_INLINE int32_t __float_as_int(float a) { return __builtin_bit_cast(int32_t, a); }
LOWBIT_INLINE uint32_t __float_as_uint(float a) { return __builtin_bit_cast(uint32_t, a); }
LOWBIT_INLINE float __int_as_float(int32_t a) { return __builtin_bit_cast(float, a); }
LOWBIT_INLINE float __uint_as_float(uint32_t a) { return __builtin_bit_cast(float, a); }
LOWBIT_INLINE float __int2float_rn(int32_t a) { return static_cast<float>(a); }
LOWBIT_INLINE int32_t __float2int_rn(float a) { return static_cast<int32_t>(rintf(a)); }
template <class T>
LOWBIT_INLINE void __stcs(T* to, T value) { *to = value; }
LOWBIT_INLINE uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}
LOWBIT_INLINE uint32_t __funnelshift_rc(uint32_t low, uint32_t high, uint32_t count) {
  return static_cast<uint32_t>((static_cast<uint64_t>(high) << 32 | low) >> (count < 32 ? count : 32));
}
LOWBIT_INLINE uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t bytes = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) bytes |= static_cast<uint32_t>(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return bytes;
}

namespace lowbit::gpu {

LOWBIT_INLINE float float_of_half(uint32_t bits) {  // the lower half
  return static_cast<float>(__builtin_bit_cast(_Float16, static_cast<uint16_t>(bits)));
}

}  // namespace lowbit::gpu

// Functions without CUDA attributes are for the device, too.
#pragma clang force_cuda_host_device begin
