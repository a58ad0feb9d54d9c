// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels that pack a float weight, and of the one that searches it for inf and nan: the same text for
// host and device.
#pragma once

#include "formats/layout.hpp"
#include "formats/scales.hpp"

namespace lowbit::gpu {

constexpr int kPackThreads = 256;  // one CTA per panel; thread t has column t % 16, and groups t / 16 + 16 i

struct PackCall {
  Sections to;  // sections of PanelLayout
  int64_t n, k, padded_k, groups, group_k;
  int bits;
  float code_max, symmetric_zero;
  Mapping mapping;
  DType dtype;
  bool asymmetric, half_scales, searches;
  const void* weight;       // [n, k]
  const float* importance;  // [k]; null: all k weigh the same
  uint8_t* packed;
  float *scale, *zero;  // scratch, [panels][groups][16]
  int64_t* levels;      // scratch, likewise: sums of levels (ColumnSum)
  float* sums;          // [panels][3]: sums of w * w, of squared errors, and of those of absmax
};

constexpr int64_t kFiniteStretch = 16 * kPackThreads;  // elements per CTA and iteration
constexpr int64_t kMaxFiniteCtas = 1024;

struct FiniteCall {
  const void* data;
  int64_t count;
  DType dtype;
  int32_t* found;  // one per CTA: 1 if it found an inf or a nan, else 0
};

}  // namespace lowbit::gpu
