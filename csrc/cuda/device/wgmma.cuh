// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup, 4 warps, on compute capability 9.0. Tests implement each instruction on the host.
//
// The first factor is in registers, 16 rows per warp in the layout of mma.cuh, or in shared memory like the second.
// Accumulators of 8 columns each have the layout of c in mma.cuh. Rows of the second factor are columns of the result,
// with k along them; or, for 16-bit floats, rows are k, with columns of the result along them. It is in shared memory
// in one of two layouts:
//   matrices  of 8 rows x 16 bytes, 128 bytes each: those of the same rows are adjacent, and the next 8 rows
//             kRowsStep bytes further
//   lines     of 128 bytes, one per row of 64 16-bit floats, beginning at multiples of 1024: 16-byte piece i of
//             line r is at position i ^ r % 8. The next 64 columns of all rows are kPanelStep bytes further.
//
// A product is asynchronous. Until its warps have waited for it, they must not touch its accumulators, the registers of
// its first factor, or the shared memory that it reads.
#pragma once

#include "cuda/device/tiles.cuh"

#ifdef __CUDACC_RTC__
namespace lowbit::cuda {

// Makes registers written by this thread visible to its next product.
LOWBIT_INLINE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products since the last call become a group. Waits for all groups but the last kPending.
LOWBIT_INLINE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
LOWBIT_INLINE void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kPending) : "memory");
}

// Makes shared memory filled by copies of other threads visible to this one's products, which read it through another
// proxy than loads; to be called after the wait for the copies.
LOWBIT_INLINE void show_to_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Gives registers of this warpgroup to others, or takes more: kCount per thread, a multiple of 8.
template <bool kMore, int kCount>
LOWBIT_INLINE void set_registers() {
  if constexpr (kMore) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kCount));
  else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kCount));
}

// A compiler barrier for accumulators.
template <class Sum, int kCount>
LOWBIT_INLINE void hold(Sum (&c)[kCount][4]) {
#pragma unroll
  for (auto& of : c)
#pragma unroll
    for (Sum& sum : of)
      if constexpr (std::is_same_v<Sum, float>) asm volatile("" : "+f"(sum) :: "memory");
      else asm volatile("" : "+r"(sum) :: "memory");
}

// Accumulators that a product will overwrite: their values are undefined.
template <int kCount>
LOWBIT_INLINE void fresh(float (&c)[kCount][4]) {
#pragma unroll
  for (auto& of : c)
#pragma unroll
    for (float& sum : of) asm volatile("" : "=f"(sum));
}

// kAlongK: bytes from 16 bytes, or 8 rows, of k to the next; kAlongColumns: from 8 columns to the next.
template <int kAlongK, int kAlongColumns>
LOWBIT_INLINE uint64_t matrices_at(const void* p) {
  return (shared_address(p) & 0x3ffff) >> 4 | uint64_t{kAlongK >> 4} << 16 | uint64_t{kAlongColumns >> 4} << 32;
}

template <int kPanelStep>
LOWBIT_INLINE uint64_t lines_at(const void* p) {
  return matrices_at<kPanelStep, 1024>(p) | uint64_t{1} << 62;
}

#define LOWBIT_FOUR(X, i) X(c[i][0]), X(c[i][1]), X(c[i][2]), X(c[i][3])
#define LOWBIT_SIXTEEN(X, i) LOWBIT_FOUR(X, i), LOWBIT_FOUR(X, i + 1), LOWBIT_FOUR(X, i + 2), LOWBIT_FOUR(X, i + 3)
#define LOWBIT_SUMS_32(X) LOWBIT_SIXTEEN(X, 0)
#define LOWBIT_SUMS_64(X) LOWBIT_SUMS_32(X), LOWBIT_SIXTEEN(X, 4)
#define LOWBIT_SUMS_128(X) LOWBIT_SUMS_64(X), LOWBIT_SIXTEEN(X, 8), LOWBIT_SIXTEEN(X, 12)
#define LOWBIT_SUMS_256(X) \
  LOWBIT_SUMS_128(X), LOWBIT_SIXTEEN(X, 16), LOWBIT_SIXTEEN(X, 20), LOWBIT_SIXTEEN(X, 24), LOWBIT_SIXTEEN(X, 28)
#define LOWBIT_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define LOWBIT_NAMES_64 LOWBIT_NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define LOWBIT_NAMES_128                                                                          \
  LOWBIT_NAMES_64 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50," \
                  "%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define LOWBIT_NAMES_256                                                               \
  LOWBIT_NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79," \
  "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,"           \
  "%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"     \
  "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define LOWBIT_FLOAT_SUM(c) "+f"(c)
#define LOWBIT_WHOLE_SUM(c) "+r"(c)
// rest: the operands after the second factor.
#define LOWBIT_WGMMA(columns, types, SUM, first, b_name, adds_name, rest)                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " adds_name ", 0; wgmma.mma_async.sync.aligned.m64n" #columns types \
               " {" LOWBIT_NAMES_##columns "}, {" first "}, " b_name ", p" rest ";}"                              \
               : LOWBIT_SUMS_##columns(SUM)                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(adds)))
#define LOWBIT_WGMMA_OF(types, SUM, rest)                                                                \
  if constexpr (kCount == 4) LOWBIT_WGMMA(32, types, SUM, "%16,%17,%18,%19", "%20", "%21", rest);        \
  else if constexpr (kCount == 8) LOWBIT_WGMMA(64, types, SUM, "%32,%33,%34,%35", "%36", "%37", rest);   \
  else if constexpr (kCount == 16) LOWBIT_WGMMA(128, types, SUM, "%64,%65,%66,%67", "%68", "%69", rest); \
  else LOWBIT_WGMMA(256, types, SUM, "%128,%129,%130,%131", "%132", "%133", rest)

// c += a b for 16-bit floats, or c = a b unless it adds: 64 rows per warpgroup, 8 kCount columns, 16 k. (If other
// instructions wrote zeros to c, the compiler would wait for each product.)
template <DType dtype, bool kRowsAreK, int kCount>
LOWBIT_INLINE void multiply_floats(float (&c)[kCount][4], const uint32_t (&a)[4], uint64_t b, bool adds) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16 || kCount == 32);
  constexpr bool kBfloat16 = dtype == DType::bfloat16;
  if constexpr (kBfloat16 && kRowsAreK) {
    LOWBIT_WGMMA_OF("k16.f32.bf16.bf16", LOWBIT_FLOAT_SUM, ", 1, 1, 1");
  } else if constexpr (kBfloat16) {
    LOWBIT_WGMMA_OF("k16.f32.bf16.bf16", LOWBIT_FLOAT_SUM, ", 1, 1, 0");
  } else if constexpr (kRowsAreK) {
    LOWBIT_WGMMA_OF("k16.f32.f16.f16", LOWBIT_FLOAT_SUM, ", 1, 1, 1");
  } else {
    LOWBIT_WGMMA_OF("k16.f32.f16.f16", LOWBIT_FLOAT_SUM, ", 1, 1, 0");
  }
}
template <DType dtype, int kRowsStep, int kCount>
LOWBIT_INLINE void multiply_by_shared(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  multiply_floats<dtype, false>(c, a, matrices_at<128, kRowsStep>(second), adds);
}
template <DType dtype, int kCount>
LOWBIT_INLINE void multiply_by_lines(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  multiply_floats<dtype, false>(c, a, lines_at<16>(second), adds);
}
template <DType dtype, int kPanelStep, int kCount>
LOWBIT_INLINE void multiply_by_lines_of_k(float (&c)[kCount][4], const uint32_t (&a)[4], const void* second,
                                          bool adds) {
  static_assert(kCount > 4);  // at least one line
  multiply_floats<dtype, true>(c, a, lines_at<kPanelStep>(second), adds);
}

// The same with the first factor as lines too: 64 rows, with k along them.
#define LOWBIT_WGMMA_SHARED(columns, types, a_name, b_name, adds_name)                                            \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " adds_name ", 0; wgmma.mma_async.sync.aligned.m64n" #columns types \
               " {" LOWBIT_NAMES_##columns "}, " a_name ", " b_name ", p, 1, 1, 0, 0;}"                           \
               : LOWBIT_SUMS_##columns(LOWBIT_FLOAT_SUM) : "l"(a), "l"(b), "r"(static_cast<int>(adds)))
#define LOWBIT_WGMMA_SHARED_OF(types)                                                        \
  if constexpr (kCount == 4) LOWBIT_WGMMA_SHARED(32, types, "%16", "%17", "%18");            \
  else if constexpr (kCount == 8) LOWBIT_WGMMA_SHARED(64, types, "%32", "%33", "%34");       \
  else LOWBIT_WGMMA_SHARED(128, types, "%64", "%65", "%66")
template <DType dtype, int kCount>
LOWBIT_INLINE void multiply_lines(float (&c)[kCount][4], const void* first, const void* second, bool adds) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16);
  const uint64_t a = lines_at<16>(first), b = lines_at<16>(second);
  if constexpr (dtype == DType::bfloat16) {
    LOWBIT_WGMMA_SHARED_OF("k16.f32.bf16.bf16");
  } else {
    LOWBIT_WGMMA_SHARED_OF("k16.f32.f16.f16");
  }
}

// c += a b for unsigned bytes by signed bytes: 32 k.
template <int kRowsStep, int kCount>
LOWBIT_INLINE void multiply_by_shared(int32_t (&c)[kCount][4], const uint32_t (&a)[4], const void* second, bool adds) {
  static_assert(kCount == 4 || kCount == 8 || kCount == 16 || kCount == 32);
  const uint64_t b = matrices_at<128, kRowsStep>(second);
  LOWBIT_WGMMA_OF("k32.s32.u8.s8", LOWBIT_WHOLE_SUM, "");
}

// A copy made by an instruction. Otherwise products may read first-factor registers that were loaded after the
// registers were reassigned: ptxas (13.0 and 13.5) tracks only computed ones.
LOWBIT_INLINE uint32_t computed(uint32_t a) {
  uint32_t same = 0x3210;
  asm volatile("" : "+r"(same));
  return __byte_perm(a, 0, same);
}

// a * (high + low) for each half, rounded once, except for 2^-16 of it.
LOWBIT_INLINE uint32_t scale_bf16x2(uint32_t a, uint32_t high, uint32_t low) {
  uint32_t d;
  asm("{.reg .b32 rest; mul.rn.bf16x2 rest, %1, %3; fma.rn.bf16x2 %0, %1, %2, rest;}"
      : "=r"(d) : "r"(a), "r"(high), "r"(low));
  return d;
}

// (a - less) * scale for each half, the difference exact.
LOWBIT_INLINE uint32_t scale_f16x2(uint32_t a, uint32_t less, uint32_t scale) {
  uint32_t d;
  asm("{.reg .b32 rest; sub.rn.f16x2 rest, %1, %2; mul.rn.f16x2 %0, rest, %3;}"
      : "=r"(d) : "r"(a), "r"(less), "r"(scale));
  return d;
}

}  // namespace lowbit::cuda
#endif
