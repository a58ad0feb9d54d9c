// SPDX-License-Identifier: Apache-2.0
// The 16 levels of a 4-bit lookup format, in shared memory.
#pragma once

#include "gpu/linear/activations.cuh"
#include "level_zero/linear/constants.hpp"

namespace lowbit::level_zero {

// A level cut into parts: 8 bytes.
struct LevelParts {
  uint32_t first, last;  // parts 0 and 1; part 2
};

template <Format kFormat>
LOWBIT_INLINE float level_of(int code) {
  if constexpr (is_table(kFormat)) return codec_of<kFormat>::level(code);
  else return 0.0f;
}

LOWBIT_INLINE LevelParts level_parts(Format format, int code) {
  float level = 0.0f;
#define LOWBIT_FORMAT(name, Codec) \
  if (is_table(Format::name) && format == Format::name) level = level_of<Format::name>(code);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  float part[gpu::kMaxParts];
  gpu::cut(level, part);
  return {gpu::upper_halves(part[0], part[1]), gpu::upper_halves(part[2], 0.0f)};
}

// A level is the sum of its parts.
LOWBIT_INLINE float whole_level(const LevelParts& parts) {
  const float lower = __uint_as_float(parts.first & 0xffff0000u) + __uint_as_float(parts.last << 16);
  return __uint_as_float(parts.first << 16) + lower;
}

}  // namespace lowbit::level_zero
