// SPDX-License-Identifier: Apache-2.0
// Rotation of a row of keys or a query in the registers of a warp: lane l holds columns l, 32 + l, 64 + l ...
#pragma once

#include "cuda/attention/tile.cuh"
#include "cuda/decode/call.hpp"

namespace lowbit::cuda {

template <int kGroups>
LOWBIT_INLINE void load_row(float (&x)[kGroups], const void* from, DType dtype, int64_t at, int columns) {
  const auto load = [&](const auto* row, auto&& decoded) {
#pragma unroll
    for (int g = 0; g < kGroups; g++) {
      const int column = g * 32 + lane_of_warp();
      x[g] = column < columns ? decoded(row[at + column]) : 0.0f;
    }
  };
  if (dtype == DType::float32) load(static_cast<const float*>(from), [](float a) { return a; });
  else if (dtype == DType::bfloat16)
    load(static_cast<const uint16_t*>(from), [](uint16_t a) { return float_from_bfloat16(a); });
  else load(static_cast<const uint16_t*>(from), [](uint16_t a) { return float_of_half(a); });
}

template <int kGroups>
LOWBIT_INLINE void rotate_groups(float (&x)[kGroups]) {
#pragma unroll
  for (int half = 1; half < kv_rotation(kGroups * 32) / 32; half *= 2)
#pragma unroll
    for (int g = 0; g < kGroups; g++)
      if (!(g & half)) {
        const float a = x[g], b = x[g + half];
        x[g] = a + b, x[g + half] = a - b;
      }
}

// Rotates by a normalized Hadamard matrix, in the order of the CPU's rows, and so with the same bits.
template <int kGroups>
LOWBIT_INLINE void rotate(float (&x)[kGroups]) {
  constexpr int kSize = static_cast<int>(kv_rotation(kGroups * 32));
  const int lane = lane_of_warp();
  const float norm = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(kSize)));
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    float sum = 0;
#pragma unroll
    for (int j = 0; j < 16; j++) {
      int odd = j & lane;  // number of bits set in both
      odd ^= odd >> 2, odd ^= odd >> 1;
      sum = __fmaf_rn(__shfl_sync(kWarp, x[g], j, 16), odd & 1 ? -1.0f : 1.0f, sum);
    }
    sum *= norm;
    const float other = __shfl_xor_sync(kWarp, sum, 16);
    x[g] = lane < 16 ? sum + other : other - sum;
  }
  rotate_groups(x);
}

// The same except for the last bits, in a third of the instructions.
template <int kGroups>
LOWBIT_INLINE void rotate_query(float (&x)[kGroups]) {
  const float norm = __fdiv_rn(1.0f, __fsqrt_rn(static_cast<float>(kv_rotation(kGroups * 32))));
#pragma unroll
  for (int g = 0; g < kGroups; g++) {
    x[g] *= norm;
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      x[g] = __shfl_xor_sync(kWarp, x[g], step) + (lane_of_warp() & step ? -x[g] : x[g]);
  }
  rotate_groups(x);
}

}  // namespace lowbit::cuda
