// SPDX-License-Identifier: Apache-2.0
// Dequantizes a packed weight, or some of its rows, one stretch of a row per CTA.
#pragma once

#include "formats/layout_codes.hpp"
#include "gpu/device/floats.cuh"
#include "gpu/quantize/call.hpp"

namespace lowbit::gpu {

LOWBIT_INLINE int64_t wanted_row(const DequantizeCall& call, int64_t at) {
  if (!call.indices) return at;
  return call.index_dtype == DType::int64 ? static_cast<const int64_t*>(call.indices)[at]
                                          : static_cast<const int32_t*>(call.indices)[at];
}

// On Intel GPUs the host checks afterwards. On CUDA a call waits for nothing: the next synchronization reports an
// error, as with torch's own look-up.
LOWBIT_INLINE void note_outside(const DequantizeCall& call, int64_t at) {
#ifdef LOWBIT_LANES
  *call.outside = at;
#else
  (void)call, (void)at, fail();
#endif
}

// kAnyInteger: any integer format, with the number of bits from the call.
template <Format kFormat, class From, bool kAnyInteger = false>
LOWBIT_INLINE void dequantize(const DequantizeCall& call) {
  const int64_t stretches = ceil_div(call.spec.k, kStretch), at = blockIdx.x / stretches, n = wanted_row(call, at),
                begin = blockIdx.x % stretches * kStretch, end = smaller(begin + kStretch, call.spec.k);
  if (n < 0 || n >= call.spec.n) return note_outside(call, at);
  for (int64_t k = begin + threadIdx.x; k < end; k += kDequantizeThreads) {
    float weight;
    if constexpr (kAnyInteger) weight = read_integer<From>(call.bits, call.spec, call.sections, call.weight, n, k);
    else weight = read_weight<kFormat, From>(call.spec, call.sections, call.weight, n, k);
    store_from_float(call.out, call.dtype, at * call.spec.k + k, weight);
  }
}

}  // namespace lowbit::gpu
