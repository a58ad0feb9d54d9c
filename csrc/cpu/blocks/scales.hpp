// SPDX-License-Identifier: Apache-2.0
// The scales of consecutive blocks of a BlockedWeight as float32.
#pragma once

#include "ops/blocks.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Rounded after the product and after the sum, as in bitsandbytes.
LOWBIT_INLINE void scales_of(const BlockedWeight& weight, int64_t first, int64_t count, float* out) {
  const float* absmax = weight.absmax.as<const float>();
  if (!weight.scale_codes) {
    for (int64_t i = 0; i < count; i++) out[i] = absmax[first + i];
    return;
  }
  const uint8_t* codes = weight.scale_codes.as<const uint8_t>();
  const float* map = weight.code_map.as<const float>();
  const float offset = *weight.offset.as<const float>();
  for (int64_t i = 0; i < count; i++)
    out[i] = map[codes[first + i]] * absmax[(first + i) / kNestedBlock] + offset;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
