// SPDX-License-Identifier: Apache-2.0
// What the kernels of attention get, the same text for host and device, and the sizes of their tiles.
#pragma once

#include "cuda/attention/call.hpp"

namespace lowbit::level_zero {

constexpr int kSubGroup = 16, kAttentionThreads = 128, kSubGroups = kAttentionThreads / kSubGroup;
constexpr int kKeys = 2, kKvTile = kSubGroup * kKeys;  // keys of a lane, of a tile

constexpr int kMostColumns = 256;  // head dims

// Of the forward, for head dims up to `columns`: each sub-group has `rows` queries, as much as registers hold.
struct ForwardShape {
  int columns;
  constexpr int rows() const { return columns <= 64 ? 4 : columns <= 128 ? 2 : 1; }
  constexpr int q_tile() const { return rows() * kSubGroups; }
};
// Which of the kernels for 64, 128 and 256 columns.
constexpr int kernel_columns(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : kMostColumns; }
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

// What a mod captured (score/spirv.hpp), in memory of the device; null: there is no mod.
struct ModTable {
  static constexpr int kGradients = 1;
  const uint64_t* words = nullptr;
};

struct AttentionCall : cuda::AttentionCallOf<ModTable> {
  int32_t e = 0, ev = 0;
  DType dtype = DType::other, bias_dtype = DType::other;  // of q, k and v; of the mask of the call
};

// Before the mods of a call are asked: their table is written. The words are as many as a launch may be given.
struct TableCall {
  static constexpr int kMost = 128;
  int32_t* fault;
  uint64_t* table;
  uint64_t words[kMost];
};

}  // namespace lowbit::level_zero
