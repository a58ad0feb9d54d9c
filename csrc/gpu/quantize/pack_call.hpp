// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels that pack a float weight, and of the one that looks for inf and nan; the same text for
// host and device.
#pragma once

#include "formats/layout.hpp"
#include "formats/scales.hpp"

namespace lowbit::gpu {

constexpr int kPackThreads = 256;  // of a CTA, which has a panel: thread t has column t % 16, and groups t / 16 + 16 i

struct PackCall {
  Sections to;  // of PanelLayout
  int64_t n, k, padded_k, groups, group_k;
  int bits;
  float code_max, symmetric_zero;
  Mapping mapping;
  DType dtype;
  bool asymmetric, half_scales, searches;
  const void* weight;       // [n, k]
  const float* importance;  // [k]; null: every k counts the same
  uint8_t* packed;
  float *scale, *zero;  // room, [panels][groups][16]
  int64_t* levels;      // room, likewise: sums of levels (ColumnSum)
  float* sums;          // [panels][3]: of w * w, of squares of errors, and of those of absmax
};

constexpr int64_t kFiniteStretch = 16 * kPackThreads;  // elements of a CTA at a time
constexpr int64_t kMaxFiniteCtas = 1024;

struct FiniteCall {
  const void* data;
  int64_t count;
  DType dtype;
  int32_t* found;  // of each CTA: 1 where there is an inf or a nan, else 0
};

}  // namespace lowbit::gpu
