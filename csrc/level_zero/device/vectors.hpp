// SPDX-License-Identifier: Apache-2.0
// Vector types of OpenCL functions, and pointers to global memory: reads through any other pointer check for local
// memory, too.
#pragma once

#include "core/bits.hpp"

namespace lowbit::level_zero {

template <class T, int count>
using Vector = T __attribute__((ext_vector_type(count)));
using f32x8 = Vector<float, 8>;
using i32x8 = Vector<int32_t, 8>;
using u32x8 = Vector<uint32_t, 8>;
using u32x2 = Vector<uint32_t, 2>;
using u32x4 = Vector<uint32_t, 4>;
using u16x8 = Vector<uint16_t, 8>;

template <class T>
using Global = T __attribute__((address_space(1)));

template <class T>
LOWBIT_INLINE const Global<T>* global(const void* p) { return (const Global<T>*)(p); }  // NOLINT: no other cast can
template <class T>
LOWBIT_INLINE Global<T>* global(void* p) { return (Global<T>*)(p); }  // NOLINT

}  // namespace lowbit::level_zero
