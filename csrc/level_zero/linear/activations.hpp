// SPDX-License-Identifier: Apache-2.0
// Prepares activations: the kernels of gpu/linear/activations.cuh, and floats and sums that only these products need.
#pragma once

#include "gpu/linear/activations.cuh"

namespace lowbit::level_zero {

using gpu::LinearCall;

// Codes, with one sum per row, or with sums per tile or part of a tile.
template <bool kParts>
LOWBIT_INLINE void code_rows(const LinearCall& call) {
  const auto code_bits = static_cast<int>((call.sections.row_bytes - call.sections.codes) / (call.tiles * 128));
  gpu::quantize_rows<kParts>(call, gpu::tile_groups(call.spec), code_bits == 4 ? 0 : 1 << (code_bits - 1));
}

// Float32 activations for elementwise products: [m, padded k], padded with zeros. A row below 2^-60 is multiplied by
// 2^60, so that products are not subnormal.
LOWBIT_INLINE void widen_rows(const LinearCall& call) {
  LOWBIT_SHARED(int32_t, warps, [gpu::kLinearWarps]);
  const int64_t row = blockIdx.x, padded = call.tiles * kTileK;
  const bool float8 = call.x_format == XFormat::float8_row;
  const int32_t amax = gpu::largest_of_row(call, row, warps);
  const gpu::Range range = gpu::Range::symmetric(amax, E4M3::largest);
  const float up = amax < (127 - 60) << 23 ? 0x1p60f : 1.0f;
  if (threadIdx.x == 0) call.row_scale[row] = float8 ? range.scale : 1.0f / up;
  for (int64_t k = threadIdx.x; k < padded; k += gpu::kLinearThreads) {
    float x = k < call.spec.k ? gpu::load_as_float(call.x, call.dtype, row * call.spec.k + k) : 0.0f;
    x = float8 ? E4M3::decode(E4M3::encode(gpu::f32{x * range.inverse})).lane : x * up;
    static_cast<float*>(call.ordered)[row * padded + k] = x;
  }
}

// Sums of float activations that share a zero point, in the units in which they are multiplied (row_scale). A thread
// computes one.
LOWBIT_INLINE void sum_rows(const LinearCall& call) {
  const int per_tile = gpu::tile_groups(call.spec);
  const int64_t per_row = int64_t{call.tiles} * per_tile, length = kTileK / per_tile,
                at = blockIdx.x * gpu::kLinearThreads + threadIdx.x;
  if (at >= call.m * per_row) return;
  const int64_t row = at / per_row, begin = at % per_row * length, end = smaller(begin + length, call.spec.k);
  const float up = call.row_scale[row] < 1.0f ? 0x1p60f : 1.0f;
  float sum = 0.0f;
  for (int64_t k = begin; k < end; k++)
    sum += gpu::load_as_float(call.x, call.dtype, row * call.spec.k + k) * up;
  call.sums[at].sum = sum;
}

}  // namespace lowbit::level_zero
