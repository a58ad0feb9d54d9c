// SPDX-License-Identifier: Apache-2.0
// Moves tiles of 16-bit floats between global memory, shared memory and the tensor cores. Tests implement each
// instruction on the host.
//
// Lane (g, t) of a warp holds, for an 8 x 8 matrix, the pair in row g, columns 2t and 2t + 1, as mma.cuh takes 8 rows
// or columns and 8 k.
#pragma once

#include "core/dtype.hpp"
#include "cuda/device/mma.cuh"

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

LOWBIT_INLINE uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

// Four matrices: lane l passes the address of row l % 8 of matrix l / 8, a multiple of 16 bytes.
LOWBIT_INLINE void load_matrices(uint32_t (&to)[4], const uint16_t* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row)) : "memory");
}
// The same, each transposed; the offset `bytes` costs no register if constant.
LOWBIT_INLINE void load_transposed(uint32_t (&to)[4], const uint16_t* row, uint32_t bytes = 0) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(shared_address(row) + bytes) : "memory");
}

// Copies 16 bytes from global to shared memory, or zeros; complete once this thread has waited. Eight lanes with 128
// contiguous bytes make one request to L2. An H200 then copies 9 TB/s from L2, also to rows that begin at multiples of
// 32 bytes; 4.5 to 6 at multiples of 16, which split sectors; 2.8 if each lane's bytes are separate.
LOWBIT_INLINE void copy_async(uint16_t* to, const uint16_t* from, bool is_there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(shared_address(to)), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}
// The same for 8 or 16 bytes, cached in L1.
template <int kBytes = 16>
LOWBIT_INLINE void copy_through_l1(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"(shared_address(to)), "l"(from), "n"(kBytes) : "memory");
}
LOWBIT_INLINE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// This thread's copies since the last call become a group, possibly empty. Waits for all groups but the last kPending.
LOWBIT_INLINE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
LOWBIT_INLINE void wait_for_groups() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }

// c += a b for float16 pairs: 16 k.
LOWBIT_INLINE void multiply_f16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^a to 2 ulp; 0 if that is subnormal.
LOWBIT_INLINE float power_of_2(float a) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(a));
  return power;
}

// 1 / a to 1 ulp; 0 if that is subnormal.
LOWBIT_INLINE float reciprocal(float a) {
  float made;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(a));
  return made;
}

}  // namespace lowbit::cuda
#endif

namespace lowbit::cuda {

template <DType dtype>
LOWBIT_INLINE void multiply_16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (dtype == DType::bfloat16) multiply_bf16(c, a, b);
  else multiply_f16(c, a, b);
}
template <DType dtype>
LOWBIT_INLINE uint32_t pair_of(float low, float high) {
  if constexpr (dtype == DType::bfloat16) return pair_of_bf16(low, high);
  else return pair_of_f16(low, high);
}

}  // namespace lowbit::cuda
