// SPDX-License-Identifier: Apache-2.0
// All of a packed weight as float32, a stretch of a row to a CTA.
#pragma once

#include "cuda/device/kernel.cuh"
#include "cuda/quantize/call.hpp"
#include "formats/layout_codes.hpp"

namespace lowbit::cuda {

template <Format kFormat>
LOWBIT_INLINE void dequantize(const DequantizeCall& call) {
  const int64_t stretches = ceil_div(call.spec.k, kStretch), n = blockIdx.x / stretches,
                begin = blockIdx.x % stretches * kStretch, end = smaller(begin + kStretch, call.spec.k);
  for (int64_t k = begin + threadIdx.x; k < end; k += kDequantizeThreads)
    call.out[n * call.spec.k + k] = read_weight<kFormat, PanelLayout>(call.spec, call.sections, call.weight, n, k);
}

}  // namespace lowbit::cuda
