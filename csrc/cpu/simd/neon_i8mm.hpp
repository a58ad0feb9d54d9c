// SPDX-License-Identifier: Apache-2.0
// NEON with smmla (i8mm, Armv8.6 and later): 32 products of int8, of two rows by two columns, are added into int32.
// Everything else is from neon_dot.
#pragma once

#include "cpu/simd/neon_dot.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

using TileSum = int32_t;
LOWBIT_INLINE int32x4_t add_matrix(int32x4_t sums, int8x16_t x, int8x16_t w) { return vmmlaq_s32(sums, x, w); }

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/neon_tiles.hpp"
#include "cpu/simd/vector.hpp"
