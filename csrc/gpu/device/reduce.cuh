// SPDX-License-Identifier: Apache-2.0
// Sums and maxima over the threads of a warp or a CTA, returned to each of them, in a fixed order.
#pragma once

#include "gpu/device/vector.cuh"

namespace lowbit::gpu {

struct Largest {  // bits of non-negative floats; nan is above inf
  LOWBIT_INLINE int32_t operator()(int32_t a, int32_t b) const { return a > b ? a : b; }
};
struct Total {
  LOWBIT_INLINE int32_t operator()(int32_t a, int32_t b) const { return a + b; }
};

template <class Combine, class T>
LOWBIT_INLINE T of_warp(Combine combine, T value) {
#pragma unroll
  for (int step = 16; step; step /= 2) value = combine(value, __shfl_xor_sync(kWarp, value, step));
  return value;
}

// `warps`: shared memory of one T per warp of the CTA, which no other code accesses any more.
template <int kWarps, class Combine, class T>
LOWBIT_INLINE T of_cta(Combine combine, T value, T (&warps)[kWarps]) {
  value = of_warp(combine, value);
  __syncthreads();  // all earlier reads are done
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  value = warps[0];
#pragma unroll
  for (int i = 1; i < kWarps; i++) value = combine(value, warps[i]);
  return value;
}

}  // namespace lowbit::gpu
