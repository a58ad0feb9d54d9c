// SPDX-License-Identifier: Apache-2.0
// The specialisation constants of a linear module, set by rows.cpp in this order.
#pragma once

#include "level_zero/device/specialise.hpp"

namespace lowbit::level_zero {

// One constant per property: compilers turn a choice by number into tables.
LOWBIT_INLINE int code_bits() { return specialised(0, 4); }
LOWBIT_INLINE int weight_parts() { return specialised(1, 1); }          // parts of bfloat16 in a value before scaling
LOWBIT_INLINE int x_parts() { return specialised(2, 1); }               // parts of a float activation
LOWBIT_INLINE int scales_per_tile() { return specialised(3, 1); }       // along k; 0: one for all k, no zero points
LOWBIT_INLINE bool has_zero_points() { return specialised(4, 0) != 0; }
LOWBIT_INLINE bool has_floats() { return specialised(5, 0) != 0; }      // any float format, without scales
LOWBIT_INLINE bool has_bfloat16() { return specialised(6, 0) != 0; }
LOWBIT_INLINE bool has_levels() { return specialised(7, 0) != 0; }      // a table of 16 levels
LOWBIT_INLINE bool has_float8() { return specialised(8, 0) != 0; }

LOWBIT_INLINE int32_t zero_of_symmetric() { return 1 << (code_bits() - 1); }  // for integers

}  // namespace lowbit::level_zero
