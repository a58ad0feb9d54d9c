// SPDX-License-Identifier: Apache-2.0
// linear of many rows: columns of the weight as a dense matrix of 16 bits, or of codes, which cuBLAS multiplies, and
// the last steps on its sums.
#pragma once

#include "cuda/linear/call.hpp"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

// Weight (n, k) without the scale of its column, which the sum gets later: level times group scale stays within the
// range of 16 bits. kAnyInteger, here and below: the format is the integer format of so many bits as the call says.
template <Format kFormat, bool kAnyInteger>
LOWBIT_INLINE float without_column_scale(const DecodedCall& part, int64_t n, int64_t k) {
  const LinearCall& call = part.call;
  if constexpr (is_float(kFormat)) {
    return read_weight<kFormat, PanelLayout>(call.spec, call.sections, call.weight, n, k);
  } else {
    const int code_bits = kAnyInteger ? part.bits : bits(kFormat),
              zero = kAnyInteger ? 1 << (code_bits - 1) : symmetric_zero(kFormat);
    const auto code = static_cast<int>(read_code<PanelLayout>(code_bits, call.sections, call.weight, n, k));
    const int64_t group = call.spec.group_size ? k / call.spec.group_size : 0;
    const ScaleAndZero of = read_scale(zero, call.spec, call.sections, call.weight, n, group);
    return (static_cast<float>(codec_of<kFormat>::level(code)) - of.zero) * of.group_scale;
  }
}

// A thread decodes 16 consecutive k of one of 16 columns: its stores are whole sectors of 32 bytes, and the columns of
// its warp share the lines that it reads.
template <Format kFormat, bool kCodes, bool kAnyInteger = false>
LOWBIT_INLINE void decode_columns(const DecodedCall& part) {
  const LinearCall& call = part.call;
  const int64_t stretches = ceil_div(part.padded_k, kDecodedStretch),
                n = part.first_column + blockIdx.x / stretches * kPanelColumns + threadIdx.x % kPanelColumns,
                begin = blockIdx.x % stretches * kDecodedStretch + threadIdx.x / kPanelColumns * kDecodedRun,
                end = smaller(begin + kDecodedRun, part.padded_k);
  if (n >= part.first_column + part.columns) return;
  for (int64_t k = begin; k < end; k++) {
    const int64_t at = (n - part.first_column) * part.padded_k + k;
    const float weight = k < call.spec.k ? without_column_scale<kFormat, kAnyInteger>(part, n, k) : 0.0f;
    if constexpr (kCodes) static_cast<int8_t*>(part.decoded)[at] = static_cast<int8_t>(weight);
    else store_from_float(part.decoded, call.dtype, at, weight);
  }
}

// A row to a CTA.
LOWBIT_INLINE void code_rows(const DecodedCall& part) {
  LOWBIT_SHARED(int32_t, warps, [kLinearWarps]);
  const LinearCall& call = part.call;
  const int64_t row = blockIdx.x;
  const Range range = call.x_format == XFormat::int8_row_asymmetric
                          ? asymmetric_range(call, row, warps)
                          : Range::symmetric(largest_of_row(call, row, warps), 127.0f);
  if (threadIdx.x == 0) call.row_scale[row] = range.scale, call.row_offset[row] = -range.scale * range.zero_point;
  for (int64_t word = threadIdx.x; word < part.padded_k / 4; word += kLinearThreads) {
    float x[4];
    load_word(call, row, word, x);
    reinterpret_cast<uint32_t*>(part.codes)[row * part.padded_k / 4 + word] = codes_of(call, word, x, range).codes;
  }
}

template <Format kFormat, bool kCodes>
LOWBIT_INLINE void finish_products(const DecodedCall& part) {
  const int64_t begin = blockIdx.x * kFinishedByCta, end = smaller(begin + kFinishedByCta, part.rows * part.columns);
  for (int64_t i = begin + threadIdx.x; i < end; i += kLinearThreads) {
    const int64_t row = part.first_row + i / part.columns, n = part.first_column + i % part.columns;
    float sum;
    if constexpr (kCodes)
      sum = part.call.row_scale[row] * static_cast<float>(static_cast<const int32_t*>(part.products)[i]);
    else
      sum = static_cast<const float*>(part.products)[i];
    finish<kFormat>(part.call, row, n, sum, {.column_scale = true, .row_scale = 1.0f});
  }
}

}  // namespace lowbit::cuda
