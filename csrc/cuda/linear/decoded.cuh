// SPDX-License-Identifier: Apache-2.0
// linear of many rows: columns of the weight as a dense matrix of 16 bits, which cuBLAS multiplies, and what is left to
// do with its sums.
#pragma once

#include "cuda/linear/epilogue.cuh"

namespace lowbit::cuda {

// Weight (n, k) without the scale of its column, which its sum gets: level times group scale keeps within 16 bits.
template <Format kFormat>
LOWBIT_INLINE float without_column_scale(const LinearCall& call, int64_t n, int64_t k) {
  if constexpr (is_float(kFormat)) {
    return read_weight<kFormat, PanelLayout>(call.spec, call.sections, call.weight, n, k);
  } else {
    const auto code = static_cast<int>(read_code<kFormat, PanelLayout>(call.sections, call.weight, n, k));
    const int64_t group = call.spec.group_size ? k / call.spec.group_size : 0;
    const ScaleAndZero of = read_scale<kFormat>(call.spec, call.sections, call.weight, n, group);
    return (static_cast<float>(codec_of<kFormat>::level(code)) - of.zero) * of.group_scale;
  }
}

// A thread decodes 16 consecutive k of one of 16 columns: its stores are whole sectors of 32 bytes, and the columns of
// its warp share the lines that it reads.
template <Format kFormat>
LOWBIT_INLINE void decode_columns(const DecodedCall& part) {
  const LinearCall& call = part.call;
  const int64_t stretches = ceil_div(call.spec.k, kDecodedStretch),
                n = part.first_column + blockIdx.x / stretches * kPanelColumns + threadIdx.x % kPanelColumns,
                begin = blockIdx.x % stretches * kDecodedStretch + threadIdx.x / kPanelColumns * kDecodedRun,
                end = smaller(begin + kDecodedRun, call.spec.k);
  if (n >= part.first_column + part.columns) return;
  for (int64_t k = begin; k < end; k++)
    store_from_float(part.decoded, call.dtype, (n - part.first_column) * call.spec.k + k,
                     without_column_scale<kFormat>(call, n, k));
}

template <Format kFormat>
LOWBIT_INLINE void finish_products(const DecodedCall& part) {
  const int64_t begin = blockIdx.x * kFinishedByCta, end = smaller(begin + kFinishedByCta, part.rows * part.columns);
  for (int64_t i = begin + threadIdx.x; i < end; i += kLinearThreads)
    finish<kFormat>(part.call, part.first_row + i / part.columns, part.first_column + i % part.columns,
                    part.products[i], {.column_scale = true, .row_scale = 1.0f});
}

}  // namespace lowbit::cuda
