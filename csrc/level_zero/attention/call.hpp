// SPDX-License-Identifier: Apache-2.0
// Arguments of the attention kernels, the same text for host and device, and tile sizes.
#pragma once

#include "gpu/attention/call.hpp"

namespace lowbit::level_zero {

constexpr int kSubGroup = 16, kAttentionThreads = 128, kSubGroups = kAttentionThreads / kSubGroup;
constexpr int kKeys = 2, kKvTile = kSubGroup * kKeys;  // keys per lane, per tile

constexpr int kMaxColumns = 256;  // max head dim

// Tile sizes of the forward for head dims up to `columns`: each sub-group has `rows` queries, as many
// as registers hold.
struct ForwardShape {
  int columns;
  constexpr int rows() const { return columns <= 64 ? 4 : columns <= 128 ? 2 : 1; }
  constexpr int q_tile() const { return rows() * kSubGroups; }
};
// The columns of the kernel for a head dim: 64, 128 or 256.
constexpr int kernel_columns(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : kMaxColumns; }
constexpr const char* kernel_of(int columns, const char* const (&names)[3]) { return names[columns / 128]; }

// Tile sizes of the forward with dpas, by sub-groups of `lanes`: accumulators take half of a sub-group's registers.
struct DpasShape {
  int columns, lanes;
  constexpr int rows() const { return lanes * 64 / columns < 8 ? lanes * 64 / columns : 8; }
  constexpr int q_tile() const { return rows() * (kAttentionThreads / lanes); }
};

constexpr int32_t kBlockListFault = -2;  // replaces the index of a captured tensor in a fault: a block list

// Tile sizes of the backward: each sub-group has `rows` of the rows that stay.
struct BackwardShape {
  int columns;
  constexpr int rows() const { return columns <= 64 ? 2 : 1; }
  constexpr int tile() const { return rows() * kSubGroups; }
};

// The table of a mod's captured tensors (score/spirv.hpp), in device memory; null: no mod.
struct ModTable {
  static constexpr int kGradients = 1;
  const uint64_t* words = nullptr;
};
constexpr int64_t kOutside = INT64_MIN;  // offset of an element outside its captured tensor

struct AttentionCall : gpu::AttentionCallOf<ModTable> {
  int32_t e = 0, ev = 0;
  DType dtype = DType::other, bias_dtype = DType::other;  // dtype of q, k and v; of the mask of the call
};

// Arguments of the kernel that writes the table of a call's mods before they run. A launch can pass that many words.
struct TableCall {
  static constexpr int kMax = 128;
  int32_t* fault;
  uint64_t* table;
  uint64_t words[kMax];
};

// Start of the workspace of a call: the faults of two mods, their tables, then Sums.
constexpr int64_t kFaultBytes = 16, kTableBytes = TableCall::kMax * 8, kSumsAt = 2 * (kFaultBytes + kTableBytes);

// Accumulator of one element of a gradient: the values' parts are integers (sums.hpp).
struct SumWords {
  uint64_t high, low, special;  // special: bits of non-finite values
};
constexpr uint32_t kSumInfinite = 1, kSumMinusInfinite = 2, kSumNan = 4;

// The gradients accumulated score by score: of tensors captured by score_mod, then of the mask.
struct Sums {
  static constexpr int kMax = 17, kOfMask = kMax - 1;
  struct Of {
    SumWords* words;        // [copies][count], or null: not wanted
    int64_t count, copies;  // work-groups alternate between copies of a small one
  };

  Of of[kMax];
  int64_t mask_stride[4];
  int32_t bits;                 // accumulator bits for the largest value
  uint32_t adds;                // 0: only finds the largest
  uint32_t largest[kMax + 1];  // bits of the largest value added to each; one more pads to a word
};
struct SumsCall {
  Sums* to;
  Sums sums;
};

}  // namespace lowbit::level_zero
