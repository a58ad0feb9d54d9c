// SPDX-License-Identifier: Apache-2.0
// What the kernel of dequantize gets, the same text for host and device.
#pragma once

#include "formats/layout.hpp"

namespace lowbit::cuda {

constexpr int kDequantizeThreads = 256;
constexpr int64_t kStretch = 4 * kDequantizeThreads;  // k of a CTA

struct DequantizeCall {
  WeightSpec spec;
  Sections sections;
  const uint8_t* weight;
  float* out;  // [n, k]
};

}  // namespace lowbit::cuda
