// SPDX-License-Identifier: Apache-2.0
// Products and loads of a whole sub-group of an Intel GPU. LOWBIT_LANES is its size: 16 on Xe-HPC (pvc), 8 on Xe-HPG
// (dg2). Lane l has a column of a product of 8 rows, or of one. Each row of a factor is 32 bytes: contiguous in the
// first factor, a dword per lane in the second. Products of floats take 2, 4 or 8 rows.
//
// The functions of cl_intel_subgroup_matrix_multiply_accumulate and cl_intel_subgroups, by their mangled names. Tests
// on CPUs link a module that implements the former (tests/level_zero).
#pragma once

#include "level_zero/device/vectors.hpp"

namespace lowbit::level_zero {

constexpr int kLanes = LOWBIT_LANES;

LOWBIT_CONVERGENT uint32_t block_read(const Global<uint32_t>* from) __asm__("_Z26intel_sub_group_block_readPU3AS1Kj");
LOWBIT_CONVERGENT u32x2 block_read2(const Global<uint32_t>* from)
    __asm__("_Z27intel_sub_group_block_read2PU3AS1Kj");
LOWBIT_CONVERGENT u32x4 block_read4(const Global<uint32_t>* from) __asm__("_Z27intel_sub_group_block_read4PU3AS1Kj");
LOWBIT_CONVERGENT u32x8 block_read8(const Global<uint32_t>* from) __asm__("_Z27intel_sub_group_block_read8PU3AS1Kj");
LOWBIT_CONVERGENT uint16_t block_read_16(const Global<uint16_t>* from)
    __asm__("_Z29intel_sub_group_block_read_usPU3AS1Kt");
LOWBIT_CONVERGENT u16x8 block_read8_16(const Global<uint16_t>* from)
    __asm__("_Z30intel_sub_group_block_read_us8PU3AS1Kt");

// A lane's elements of some rows, or of one.
template <class T, int kRows>
using Rows = std::conditional_t<kRows == 1, T, Vector<T, kRows>>;

// The first factor: a lane's part of the 32 bytes of each row.
#if LOWBIT_LANES == 16
using RowPiece = int16_t;
#define LOWBIT_MANGLED_ROWS(rows) "Dv" #rows "_sDv8_iDv" #rows "_f"
LOWBIT_CONVERGENT float mad_bf16(int16_t a, i32x8 b, float sum)
    __asm__("_Z40intel_sub_group_bf16_bf16_matrix_mad_k16sDv8_if");
LOWBIT_CONVERGENT i32x8 mad_i8_u8(Vector<int16_t, 8> a, u32x8 b, i32x8 sum)
    __asm__("_Z36intel_sub_group_i8_u8_matrix_mad_k32Dv8_sDv8_jDv8_i");
LOWBIT_CONVERGENT int32_t mad_i8_u8(int16_t a, u32x8 b, int32_t sum)
    __asm__("_Z36intel_sub_group_i8_u8_matrix_mad_k32sDv8_ji");
#else
using RowPiece = int32_t;
#define LOWBIT_MANGLED_ROWS(rows) "Dv" #rows "_iDv8_iDv" #rows "_f"
LOWBIT_CONVERGENT float mad_bf16(int32_t a, i32x8 b, float sum)
    __asm__("_Z40intel_sub_group_bf16_bf16_matrix_mad_k16iDv8_if");
LOWBIT_CONVERGENT i32x8 mad_i8_u8(i32x8 a, u32x8 b, i32x8 sum)
    __asm__("_Z36intel_sub_group_i8_u8_matrix_mad_k32Dv8_iDv8_jS_");
LOWBIT_CONVERGENT int32_t mad_i8_u8(int32_t a, u32x8 b, int32_t sum)
    __asm__("_Z36intel_sub_group_i8_u8_matrix_mad_k32iDv8_ji");
#endif
#define LOWBIT_MAD_ROWS(rows, mangled)                                                                     \
  LOWBIT_CONVERGENT Rows<float, rows> mad_bf16(Rows<RowPiece, rows> a, i32x8 b, Rows<float, rows> sum)     \
      __asm__("_Z40intel_sub_group_bf16_bf16_matrix_mad_k16" mangled);                                     \
  LOWBIT_CONVERGENT Rows<float, rows> mad_f16(Rows<RowPiece, rows> a, i32x8 b, Rows<float, rows> sum)      \
      __asm__("_Z38intel_sub_group_f16_f16_matrix_mad_k16" mangled);
LOWBIT_MAD_ROWS(2, LOWBIT_MANGLED_ROWS(2))
LOWBIT_MAD_ROWS(4, LOWBIT_MANGLED_ROWS(4))
#if LOWBIT_LANES == 16
LOWBIT_MAD_ROWS(8, LOWBIT_MANGLED_ROWS(8))
#else  // a repeated type is mangled as one letter
LOWBIT_MAD_ROWS(8, "Dv8_iS_Dv8_f")
#endif
#undef LOWBIT_MAD_ROWS
#undef LOWBIT_MANGLED_ROWS

template <int kRows>
LOWBIT_INLINE Rows<RowPiece, kRows> load_rows(const void* from) {
#if LOWBIT_LANES == 16
  if constexpr (kRows == 8) return __builtin_bit_cast(Vector<int16_t, 8>, block_read8_16(global<uint16_t>(from)));
  else return static_cast<int16_t>(block_read_16(global<uint16_t>(from)));
#else
  if constexpr (kRows == 8) return __builtin_bit_cast(i32x8, block_read8(global<uint32_t>(from)));
  else return static_cast<int32_t>(block_read(global<uint32_t>(from)));
#endif
}

}  // namespace lowbit::level_zero
