// SPDX-License-Identifier: Apache-2.0
// The arguments of the kernels of attention, the same text for host and device, and the sizes of their tiles.
#pragma once

#include "gpu/attention/call.hpp"

namespace lowbit::level_zero {

constexpr int kSubGroup = 16, kAttentionThreads = 128, kSubGroups = kAttentionThreads / kSubGroup;
constexpr int kKeys = 2, kKvTile = kSubGroup * kKeys;  // keys of a lane, of a tile

constexpr int kMaxColumns = 256;  // head dims

// Of the forward, for head dims up to `columns`: each sub-group has `rows` queries, as much as registers hold.
struct ForwardShape {
  int columns;
  constexpr int rows() const { return columns <= 64 ? 4 : columns <= 128 ? 2 : 1; }
  constexpr int q_tile() const { return rows() * kSubGroups; }
};
// The columns of the kernel for a head dim: 64, 128 or 256.
constexpr int kernel_columns(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : kMaxColumns; }
constexpr const char* kernel_of(int columns, const char* const (&names)[3]) { return names[columns / 128]; }

// Of the forward by dpas, by sub-groups of so many lanes: the sums of a sub-group take half of its registers.
struct DpasShape {
  int columns, lanes;
  constexpr int rows() const { return lanes * 64 / columns < 8 ? lanes * 64 / columns : 8; }
  constexpr int q_tile() const { return rows() * (kAttentionThreads / lanes); }
};

constexpr int32_t kBlockListFault = -2;  // in place of a captured tensor in the fault: a list of blocks

// Of the backward: each sub-group has `rows` of the rows that stay.
struct BackwardShape {
  int columns;
  constexpr int rows() const { return columns <= 64 ? 2 : 1; }
  constexpr int tile() const { return rows() * kSubGroups; }
};

// The table of a mod's captured tensors (score/spirv.hpp), in memory of the device; null: there is no mod.
struct ModTable {
  static constexpr int kGradients = 1;
  const uint64_t* words = nullptr;
};
constexpr int64_t kOutside = INT64_MIN;  // the place of an element that a captured tensor does not have

struct AttentionCall : gpu::AttentionCallOf<ModTable> {
  int32_t e = 0, ev = 0;
  DType dtype = DType::other, bias_dtype = DType::other;  // of q, k and v; of the mask of the call
};

// Writes the table of a call's mods, before they are called. A launch may be given that many words.
struct TableCall {
  static constexpr int kMax = 128;
  int32_t* fault;
  uint64_t* table;
  uint64_t words[kMax];
};

// The begin of the memory of a call: the faults of two mods, their tables, then Sums.
constexpr int64_t kFaultBytes = 16, kTableBytes = TableCall::kMax * 8, kSumsAt = 2 * (kFaultBytes + kTableBytes);

// An element of a gradient while it is added up, of parts of values that are integers (sums.hpp).
struct SumWords {
  uint64_t high, low, special;  // special: bits of values that were not finite
};
constexpr uint32_t kSumInfinite = 1, kSumMinusInfinite = 2, kSumNan = 4;

// The gradients that are added up: those of tensors that score_mod captured, then that of the mask.
struct Sums {
  static constexpr int kMax = 17, kOfMask = kMax - 1;
  struct Of {
    SumWords* words;        // [copies][count], or null: not wanted
    int64_t count, copies;  // work-groups add to copies of a small one in turn
  };

  Of of[kMax];
  int64_t mask_stride[4];
  int32_t bits;                 // of sums for the largest value
  uint32_t adds;                // or finds the largest
  uint32_t largest[kMax + 1];  // bits of the largest value added to each; one more fills a word
};
struct SumsCall {
  Sums* to;
  Sums sums;
};

}  // namespace lowbit::level_zero
