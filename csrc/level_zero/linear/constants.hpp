// SPDX-License-Identifier: Apache-2.0
// The constants that a module of linear is specialised for, which rows.cpp gives in this order.
#pragma once

#include "level_zero/device/specialise.hpp"

namespace lowbit::level_zero {

// Each question has a constant of its own: of a choice by number a compiler makes tables.
LOWBIT_INLINE int code_bits() { return specialised(0, 4); }
LOWBIT_INLINE int weight_parts() { return specialised(1, 1); }          // of bfloat16 in a value before its scale
LOWBIT_INLINE int x_parts() { return specialised(2, 1); }               // in a float activation
LOWBIT_INLINE int scales_per_tile() { return specialised(3, 1); }       // along k; 0: one for all k, no zero points
LOWBIT_INLINE bool has_zero_points() { return specialised(4, 0) != 0; }
LOWBIT_INLINE bool has_floats() { return specialised(5, 0) != 0; }      // of any kind, without scales
LOWBIT_INLINE bool has_bfloat16() { return specialised(6, 0) != 0; }
LOWBIT_INLINE bool has_levels() { return specialised(7, 0) != 0; }      // 16 of them
LOWBIT_INLINE bool has_float8() { return specialised(8, 0) != 0; }

LOWBIT_INLINE int32_t zero_of_symmetric() { return 1 << (code_bits() - 1); }  // of integers

}  // namespace lowbit::level_zero
