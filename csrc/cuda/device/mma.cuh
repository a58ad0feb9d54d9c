// SPDX-License-Identifier: Apache-2.0
// Instructions that CUDA C++ does not expose. Tests implement each on the host.
//
// A warp multiplies 16 rows by 8 columns. For lane (g, t) = (lane / 4, lane % 4), a[0] belongs to row g and a[1] to row
// g + 8, both in the first half of k; a[2], a[3] to the second half; b[0], b[1] to column g; c[0], c[1] to row g,
// columns 2t and 2t + 1; c[2], c[3] to row g + 8. Lane t may hold any k in a word, as long as a and b agree.
#pragma once

#include "cuda/device/prelude.cuh"

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

// c += a b for bfloat16 pairs: 16 k.
LOWBIT_INLINE void multiply_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b for unsigned bytes by signed bytes: 32 k.
LOWBIT_INLINE void multiply_u8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// c += a b for signed bytes: 32 k.
LOWBIT_INLINE void multiply_s8s8(int32_t (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// a * b + c for each half, rounded once.
LOWBIT_INLINE uint32_t fma_bf16x2(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// Loads a word that is read once: bypasses L1.
LOWBIT_INLINE uint32_t load_once(const uint32_t* p) {
  uint32_t a;
  asm volatile("ld.global.nc.L1::no_allocate.b32 %0, [%1];" : "=r"(a) : "l"(p));
  return a;
}
LOWBIT_INLINE uint2 load_once(const uint2* p) {
  uint2 a;
  asm volatile("ld.global.nc.L1::no_allocate.v2.b32 {%0,%1}, [%2];" : "=r"(a.x), "=r"(a.y) : "l"(p));
  return a;
}

}  // namespace lowbit::cuda
#endif

namespace lowbit::cuda {

// Converts codes of up to 8 bits in both halves of a word to bfloat16 in units of 2^6, minus their zero point, exactly:
// the lowest 8 bits of a bfloat16 alone are a multiple of 2^-133, and one fma scales them to 2^-6. shift: the number of
// bits by which codes are shifted left.
constexpr float kUnitOfIntegers = 0x1p6f;
template <int kZero>
LOWBIT_INLINE uint32_t units_to_bf16(uint32_t codes, uint32_t shift = 0) {
  const uint32_t less = __float_as_uint(-kZero / kUnitOfIntegers) >> 16;
  return fma_bf16x2(codes, (0x7f00u - shift * 0x80u) * 0x10001u, less | less << 16);
}

}  // namespace lowbit::cuda
