// SPDX-License-Identifier: Apache-2.0
// Up to 16 elements of any activation dtype to a vector of float32, and back. Include after a header of cpu/simd/.
#pragma once

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE f32x16 load_as_float(const void* base, DType dtype, int64_t at, int64_t count) {
  alignas(64) float wide[16] = {};
  alignas(64) uint16_t half[16] = {};
  if (dtype == DType::float32) {
    const float* p = static_cast<const float*>(base) + at;
    if (count >= 16) return load(p);
    for (int64_t i = 0; i < count; i++) wide[i] = p[i];
    return load(wide);
  }
  const uint16_t* p = static_cast<const uint16_t*>(base) + at;
  if (count < 16) {
    for (int64_t i = 0; i < count; i++) half[i] = p[i];
    p = half;
  }
  return dtype == DType::bfloat16 ? load_bf16(p) : load_f16(p);
}

LOWBIT_INLINE void store_from_float(void* base, DType dtype, int64_t at, int64_t count, f32x16 value) {
  alignas(64) float wide[16];
  alignas(64) uint16_t half[16];
  if (dtype == DType::float32) {
    float* p = static_cast<float*>(base) + at;
    if (count >= 16) return store(p, value);
    store(wide, value);
    for (int64_t i = 0; i < count; i++) p[i] = wide[i];
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(base) + at;
  uint16_t* to = count >= 16 ? p : half;
  if (dtype == DType::bfloat16) store_bf16(to, value);
  else store_f16(to, value);
  if (count < 16)
    for (int64_t i = 0; i < count; i++) p[i] = half[i];
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
