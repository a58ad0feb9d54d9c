// SPDX-License-Identifier: Apache-2.0
// linear for many rows: decodes columns of the weight to a dense matrix of 16 bits, or of codes, for cuBLAS, and
// applies the epilogue to its results.
#pragma once

#include "cuda/device/tiles.cuh"
#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

// The first `count` of four weights in 16 bits; in one store if `whole`.
LOWBIT_INLINE void store_weights(uint16_t* to, DType dtype, const float (&weight)[4], int count, bool whole) {
  const auto pair = [&](int i) {
    return dtype == DType::bfloat16 ? pair_of_bf16(weight[i], weight[i + 1]) : pair_of_f16(weight[i], weight[i + 1]);
  };
  const uint32_t pairs[2] = {pair(0), pair(2)};
  if (whole) {
    *reinterpret_cast<uint2*>(to) = {pairs[0], pairs[1]};
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < count) to[i] = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
  }
}

// A warp decodes a tile of 16 columns x 64 k, with the weights of a lane laid out as in every product
// (call.hpp): stores are 8 bytes, and four lanes fill a sector. Unless products are the results (is_whole), a
// weight does not include the scale of its column, which is applied to the sum: level times group scale stays
// within the range of 16 bits.
template <Format kFormat, bool kCodes>
LOWBIT_INLINE void decode_columns(const DecodedCall& part) {
  LOWBIT_SHARED(float, table, [16]);
  if constexpr (is_table(kFormat)) {
    if (threadIdx.x < 16) table[threadIdx.x] = codec_of<kFormat>::level(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  const LinearCall& call = part.call;
  const auto padded_k = static_cast<int>(part.padded_k);
  const int tiles = (padded_k + 63) / 64, warp = static_cast<int>(threadIdx.x) / 32,
            g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
  const int of_call = static_cast<int>(blockIdx.x) * kLinearWarps + warp, panel = of_call / tiles,
            tile = of_call % tiles;  // 2^15 tiles at most fill kMaxDecoded
  if (panel * kPanelColumns >= part.columns) return;
  const uint8_t* from = call.weight + (part.first_column / kPanelColumns + panel) * call.sections.row_bytes;
  LaneTile<kFormat> words;
  words.load(from + call.sections.codes + static_cast<int64_t>(tile) * (kPanelColumns * kTileK * bits(kFormat) / 8), g,
             t);
  const int columns = static_cast<int>(part.columns) - panel * static_cast<int>(kPanelColumns) - 2 * g;  // left
  const bool aligned = padded_k % 4 == 0;
  const int64_t first = static_cast<int64_t>(panel * kPanelColumns + 2 * g) * padded_k + tile * kTileK + 4 * t;
  float of_columns[2] = {1.0f, 1.0f};
  if constexpr (!is_float(kFormat) && !kCodes)
    if (part.is_whole)
      for (int column = 0; column < 2; column++)
        of_columns[column] = reinterpret_cast<const float*>(from + call.sections.column_scale)[2 * g + column];
#pragma unroll
  for (int q = 0; q < kChunks; q++) {
    const int k = tile * static_cast<int>(kTileK) + 16 * q + 4 * t, count = smaller(padded_k - k, 4);
    if (count <= 0) break;
    const int group = smaller(k >> part.log2_of_group, call.groups - 1);
    const auto of_group = [&](int64_t section) {  // float16, for both columns
      return *reinterpret_cast<const uint32_t*>(from + section + (group * kPanelColumns + 2 * g) * 2);
    };
    const uint32_t scale = call.spec.group_size ? of_group(call.sections.group_scale) : 0x3c003c00u,
                   zero = call.spec.asymmetric ? of_group(call.sections.zero) : 0;
#pragma unroll
    for (int column = 0; column < 2; column++) {
      if (column >= columns) break;
      const int64_t at = first + (column ? padded_k : 0) + 16 * q;
      if constexpr (kCodes) {
        static_cast<uint32_t*>(part.decoded)[at / 4] = signed_bytes<kFormat>(words.words.bytes(q, column, t));
      } else {
        float weight[4];
        words.levels(q, column, t, table, weight);
        if constexpr (!is_float(kFormat)) {
          const float by = float_of_half(scale >> 16 * column) * (part.is_whole ? of_columns[column] : 1.0f),
                      less = call.spec.asymmetric ? float_of_half(zero >> 16 * column)
                                                  : static_cast<float>(symmetric_zero(kFormat));
#pragma unroll
          for (int i = 0; i < 4; i++) weight[i] = (weight[i] - less) * by;
        }
        store_weights(static_cast<uint16_t*>(part.decoded) + at, call.dtype, weight, count, aligned && count == 4);
      }
    }
  }
}

// One row per CTA.
LOWBIT_INLINE void code_rows(const DecodedCall& part) {
  LOWBIT_SHARED(int32_t, warps, [kLinearWarps]);
  const LinearCall& call = part.call;
  const int64_t row = blockIdx.x;
  const Range range = range_of_row(call, row, warps);
  if (threadIdx.x == 0) call.row_scale[row] = range.scale, call.row_offset[row] = -range.scale * range.zero_point;
  for (int64_t word = threadIdx.x; word < part.padded_k / 4; word += kLinearThreads) {
    float x[4];
    load_word(call, row, word, x);
    reinterpret_cast<uint32_t*>(part.codes)[row * part.padded_k / 4 + word] = codes_of(call, word, x, range).codes;
  }
}

// One stretch of a row per CTA: no division per result.
template <Format kFormat, bool kCodes>
LOWBIT_INLINE void finish_products(const DecodedCall& part) {
  const auto columns = static_cast<uint32_t>(part.columns);
  const uint32_t stretches = (columns + kFinishedByCta - 1) / kFinishedByCta, part_row = blockIdx.x / stretches,
                 begin = blockIdx.x % stretches * kFinishedByCta, end = smaller(begin + kFinishedByCta, columns);
  const int64_t row = part.first_row + part_row;
  for (uint32_t column = begin + threadIdx.x; column < end; column += kLinearThreads) {
    const int64_t at = static_cast<int64_t>(part_row) * columns + column;
    float sum;
    if constexpr (kCodes)
      sum = part.call.row_scale[row] * static_cast<float>(static_cast<const int32_t*>(part.products)[at]);
    else
      sum = static_cast<const float*>(part.products)[at];
    finish<kFormat>(part.call, row, part.first_column + column, sum, {.column_scale = true, .row_scale = 1.0f});
  }
}

}  // namespace lowbit::cuda
