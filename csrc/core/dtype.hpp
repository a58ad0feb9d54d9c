// SPDX-License-Identifier: Apache-2.0
// Element types that cross the boundary, and exact scalar conversions of the 16-bit floats (round to nearest even).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "core/bits.hpp"

namespace lowbit {

enum class DType : int8_t { float32, bfloat16, float16, float64, uint8, int8, int32, int64, boolean, other };

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::float64: case DType::int64: return 8;
    case DType::float32: case DType::int32: return 4;
    case DType::bfloat16: case DType::float16: return 2;
    default: return 1;
  }
}

constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[] = {"float32", "bfloat16", "float16", "float64", "uint8",
                                        "int8",    "int32",    "int64",   "bool",    "other"};
  return names[static_cast<int>(dtype)];
}

constexpr bool is_activation(DType dtype) {
  return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16;
}

LOWBIT_INLINE float float_from_bits(uint32_t bits) { float f; std::memcpy(&f, &bits, 4); return f; }
LOWBIT_INLINE uint32_t bits_of_float(float f) { uint32_t bits; std::memcpy(&bits, &f, 4); return bits; }

LOWBIT_INLINE float float_from_bfloat16(uint16_t h) { return float_from_bits(static_cast<uint32_t>(h) << 16); }

LOWBIT_INLINE uint16_t bfloat16_from_float(float f) {
  const uint32_t bits = bits_of_float(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

LOWBIT_INLINE float float_from_float16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return float_from_bits(sign | bits_of_float(subnormal));
}

LOWBIT_INLINE uint16_t float16_from_float(float f) {
  const uint32_t bits = bits_of_float(f), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (magnitude >> 13 & 0x3ffu));
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // >= 65520 rounds to infinity
  if (magnitude < 0x38800000u) {                                                // subnormal: let the float adder round
    const uint32_t rounded = bits_of_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    return static_cast<uint16_t>(sign | rounded);
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
}

}  // namespace lowbit
