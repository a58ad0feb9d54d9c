// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes. No std, and force-inlined: kernels of every instruction set and the source text of device
// kernels include it, and a weak copy compiled with AVX-512 must never be linked into code for an old CPU.
#pragma once

#include <cstdint>

#ifndef LOWBIT_INLINE  // a device's compiler defines its own
#define LOWBIT_INLINE [[gnu::always_inline]] inline
// Inlined even where the scalar kernels are compiled without inlining (csrc/cpu/CMakeLists.txt), so that their objects
// contain no weak symbols.
#define LOWBIT_ALWAYS_INLINE [[gnu::__always_inline__]] inline
#define LOWBIT_NOINLINE [[gnu::noinline]]
#endif

namespace lowbit {

LOWBIT_INLINE constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
LOWBIT_INLINE constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
LOWBIT_INLINE constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
LOWBIT_INLINE constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace lowbit
