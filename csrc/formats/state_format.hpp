// SPDX-License-Identifier: Apache-2.0
// The list of formats in which an optimizer stores its moments.
//
// float32, bfloat16: the values. The others have codes and one float32 scale per block of consecutive elements (the
// last block may be short); value = decode(code) * scale. Moments that can be negative (exp_avg, momentum) and those
// that cannot (exp_avg_sq) have different maps. dynamic8: bitsandbytes' and torchao's 8-bit map; dynamic4: torchao's
// 4-bit maps, two codes per byte, the first in the high nibble; float8: float8_e4m3fn. scale is absmax, and absmax /
// 448 for float8.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.hpp"

namespace lowbit {

enum class StateFormat : int { float32, bfloat16, dynamic8, dynamic4, float8 };
inline constexpr std::string_view kStateFormatNames[] = {"float32", "bfloat16", "dynamic8", "dynamic4", "float8"};

LOWBIT_INLINE constexpr bool has_codes(StateFormat format) { return format >= StateFormat::dynamic8; }
LOWBIT_INLINE constexpr int64_t state_bytes(StateFormat format, int64_t count) {
  return format == StateFormat::float32    ? 4 * count
         : format == StateFormat::bfloat16 ? 2 * count
         : format == StateFormat::dynamic4 ? (count + 1) / 2
                                           : count;
}

inline constexpr int64_t kMinStateBlock = 32, kMaxStateBlock = 4096;  // elements; a power of two

}  // namespace lowbit
