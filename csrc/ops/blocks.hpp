// SPDX-License-Identifier: Apache-2.0
// Weights in the memory layout of bitsandbytes, read in place: nothing is packed, copied or cached between calls, so
// that their owner may change them at any time.
//
// 4 bits, [n, k]: the codes of all n * k weights in row-major order, two per byte, the first in the high nibble.
// block_size consecutive codes, which may cross rows of w, share a scale: w = level(code) * scale. A scale is
// absmax[block], or, if it was itself quantized, code_map[scale_codes[block]] * absmax[block / 256] + offset.
//   blocks_linear      y = x @ w.T + bias
//   blocks_dequantize  some of the n * k weights, in order
// 8 bits (LLM.int8): x and w are codes, int8 [m, k] and [n, k], with one scale per row, its largest |value|.
//   int8_linear        y[i, j] = (sum over k of x[i] * w[j]) * (row_scale[i] * column_scale[j]) / 127^2 + bias[j]
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/list.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

inline constexpr int64_t kSmallestBlock = 32, kLargestBlock = 4096, kNestedBlock = 256;

struct BlockedWeight {
  Format format = Format::nf4;  // nf4 or fp4
  int64_t numel = 0;
  int64_t block_size = 0;                   // a power of two, kSmallestBlock to kLargestBlock
  TensorView codes;                         // uint8 [ceil(numel / 2)], contiguous
  TensorView absmax;                        // float32 [blocks], or [ceil(blocks / 256)] beside scale_codes, contiguous
  TensorView scale_codes, code_map, offset;  // uint8 [blocks], float32 [256] and one float32, contiguous; or none
};

struct BlocksLinearArgs {
  Place place{};
  BlockedWeight weight;
  TensorView x;     // [m, k] float32, bfloat16 or float16, contiguous; k a multiple of 8
  TensorView bias;  // [n] of the three dtypes, contiguous; or none
  TensorView y;     // [m, n], dtype of x, contiguous: written
};

struct BlocksDequantizeArgs {
  Place place{};
  BlockedWeight weight;
  int64_t begin = 0;  // index of the first weight, a multiple of kSmallestBlock
  TensorView out;     // float32, bfloat16 or float16, contiguous: written
};

struct Int8LinearArgs {
  Place place{};
  TensorView x, weight;                // int8 [m, k], [n, k], contiguous
  TensorView row_scale, column_scale;  // float32 [m], [n], contiguous
  TensorView bias;                     // [n] float32, bfloat16 or float16, contiguous; or none
  TensorView y;                        // [m, n], one of the three dtypes, contiguous: written
};

// Finds the place and checks everything; n of a blocks_linear is that of y.
LOWBIT_API void blocks_linear(BlocksLinearArgs args, int64_t format);
LOWBIT_API void blocks_dequantize(BlocksDequantizeArgs args, int64_t format);
LOWBIT_API void int8_linear(Int8LinearArgs args);

LOWBIT_API Call describe(const BlocksLinearArgs& args);
LOWBIT_API Call describe(const BlocksDequantizeArgs& args);
LOWBIT_API Call describe(const Int8LinearArgs& args);

}  // namespace lowbit
