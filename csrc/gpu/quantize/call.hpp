// SPDX-License-Identifier: Apache-2.0
// Arguments of the dequantize kernel: the same text for host and device.
#pragma once

#include "core/dtype.hpp"
#include "formats/layout.hpp"

namespace lowbit::gpu {

constexpr int kDequantizeThreads = 256;
constexpr int64_t kStretch = 4 * kDequantizeThreads;  // k range of a CTA

struct DequantizeCall {
  WeightSpec spec;
  Sections sections;
  const uint8_t* weight;
  const void* indices;  // int32 or int64: the rows to dequantize; null: all of them
  void* out;            // [n, k], or a row for each index
  int64_t* outside;     // index outside 0..n-1, if any; null: such an index ends the launch
  DType index_dtype, dtype;
  int bits;  // bits per code
};

}  // namespace lowbit::gpu
