// SPDX-License-Identifier: Apache-2.0
// Up to 16 elements of any activation dtype to a vector of float32, and back. Include after a header of cpu/simd/.
#pragma once

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Fewer than 16 elements are rare: one function, not inlined, serves all callers. Inlined, it was half of all code.
[[gnu::noinline]] inline f32x16 load_some_as_float(const void* base, DType dtype, int64_t at, int64_t count) {
  alignas(64) float wide[16] = {};
  if (dtype == DType::float32) {
    for (int64_t i = 0; i < count; i++) wide[i] = static_cast<const float*>(base)[at + i];
    return load(wide);
  }
  alignas(64) uint16_t half[16] = {};
  for (int64_t i = 0; i < count; i++) half[i] = static_cast<const uint16_t*>(base)[at + i];
  return dtype == DType::bfloat16 ? load_bf16(half) : load_f16(half);
}

// The vector is passed by reference: around a call with a vector by value gcc omits vzeroupper, and until the next one
// every switch between AVX and SSE code costs 0.3 us (Sapphire Rapids).
[[gnu::noinline]] inline void store_some_from_float(void* base, DType dtype, int64_t at, int64_t count,
                                                    const f32x16& value) {
  if (dtype == DType::float32) {
    alignas(64) float wide[16];
    store(wide, value);
    for (int64_t i = 0; i < count; i++) static_cast<float*>(base)[at + i] = wide[i];
    return;
  }
  alignas(64) uint16_t half[16];
  if (dtype == DType::bfloat16) store_bf16(half, value);
  else store_f16(half, value);
  for (int64_t i = 0; i < count; i++) static_cast<uint16_t*>(base)[at + i] = half[i];
}

LOWBIT_INLINE f32x16 load_as_float(const void* base, DType dtype, int64_t at, int64_t count) {
  if (count < 16) [[unlikely]] return load_some_as_float(base, dtype, at, count);
  if (dtype == DType::float32) return load(static_cast<const float*>(base) + at);
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  return dtype == DType::bfloat16 ? load_bf16(p) : load_f16(p);
}

LOWBIT_INLINE void store_from_float(void* base, DType dtype, int64_t at, int64_t count, f32x16 value) {
  if (count < 16) [[unlikely]] return store_some_from_float(base, dtype, at, count, value);
  if (dtype == DType::float32) return store(static_cast<float*>(base) + at, value);
  uint16_t* p = static_cast<uint16_t*>(base) + at;
  if (dtype == DType::bfloat16) store_bf16(p, value);
  else store_f16(p, value);
}

// Sum of the lanes in double, in order.
LOWBIT_INLINE double total(f32x16 a) {
  alignas(64) float lanes[16];
  store(lanes, a);
  double sum = 0;
  for (float lane : lanes) sum += static_cast<double>(lane);
  return sum;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
