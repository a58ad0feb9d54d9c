// SPDX-License-Identifier: Apache-2.0
// Arguments of the attention kernels for mods, the same text for host and device, and tile sizes.
#pragma once

#include "cuda/device/limits.hpp"
#include "gpu/attention/call.hpp"

namespace lowbit::cuda {

using namespace gpu;

constexpr int kAttentionWarps = kAttentionThreads / 32;
constexpr int kMaxCaptured = 16, kMaxLayout = 96;  // tensors per mod; max total of their sizes and strides
constexpr int kRowPad = 8;  // padding of each row in shared memory, so that eight rows fall into different banks

// Which mods gather from captured tensors by query or key: the more loads in flight, the fewer scores per lane.
enum class Gathers : uint8_t { none, by_mask, by_score };

// Tile sizes of the forward: a warp has 16 row_tiles queries, as many as fit in 255 registers with the accumulators of
// the result and a tile of scores. A second tile of keys and values is in flight.
struct ForwardShape {
  int e, ev, row_tiles, kv_tile;
  bool keeps_q;  // queries stay in registers
  static constexpr int kStages = 2, kThreads = kAttentionThreads;
  static constexpr bool kPersists = false;
  constexpr int q_tile() const { return 16 * row_tiles * kAttentionWarps; }
  constexpr int bytes() const {
    return 2 * (q_tile() * (e + kRowPad) + kStages * kv_tile * (e + ev + 2 * kRowPad));
  }
};
constexpr ForwardShape forward_shape(int e, int ev, Gathers gathers) {
  const int most = e > ev ? e : ev;
  if (most > 128 || gathers == Gathers::by_score) return {e, ev, 1, 32, e <= 128};
  if (gathers == Gathers::by_mask) return {e, ev, most <= 64 ? 2 : 1, most <= 64 ? 32 : 64, most > 64};
  return {e, ev, 2, most <= 64 ? 64 : 32, most <= 64};
}

// Rows of two matrices in shared memory, as lines of 64 columns (matrices.cuh).
constexpr int whole_kib(int64_t bytes) { return static_cast<int>(round_up(bytes, 1024)); }
constexpr int bytes_of_lines(int rows, int e, int ev) { return 128 * rows * ((e + 63) / 64 + (ev + 63) / 64); }

// Tile sizes of the forward by warpgroups (forward_wgmma.cuh): each has 64 queries, in registers, and scores of a tile
// of keys, 232 registers in all. A producer warpgroup copies tiles of keys and values. Position and window take the
// registers of 64 keys: with 128 keys, 156 bytes spilled.
struct WgmmaForwardShape {
  int e, ev, kv_tile, stages;
  static constexpr int kWarpgroups = 2, kThreads = 128 * (kWarpgroups + 1);
  static constexpr bool kPersists = true;  // one CTA per multiprocessor, whose ring continues from task to task
  static constexpr int q_tile() { return 64 * kWarpgroups; }
  constexpr int stage_bytes() const { return bytes_of_lines(kv_tile, e, ev) + 16; }  // and two barriers
  constexpr int bytes() const { return whole_kib(stages * stage_bytes()); }
};
constexpr WgmmaForwardShape wgmma_forward_shape(int e, int ev, Gathers gathers, bool has_position) {
  const bool few = has_position || gathers == Gathers::by_mask;
  WgmmaForwardShape shape{e, ev, gathers == Gathers::by_score ? 32 : few ? 64 : 128, 0};
  const int room = kMaxSharedOnHopper / shape.stage_bytes();
  shape.stages = room < 4 ? room : 4;
  return shape;
}

// Tile sizes of the backward: 64 rows stay, and tiles of `passing` rows of the other side pass. Head dims above 128 are
// divided among `parts` CTAs.
struct BackwardShape {
  int e, ev, passing, stages, parts;
  static constexpr int kStaying = 16 * kAttentionWarps, kThreads = kAttentionThreads;
  constexpr int bytes() const { return 2 * (kStaying + stages * passing) * (e + ev + 2 * kRowPad); }
};
constexpr BackwardShape backward_shape(int e, int ev, Gathers gathers) {
  const int most = e > ev ? e : ev;
  return {e, ev, most <= 128 && gathers != Gathers::by_score ? 32 : 16, 2, most <= 128 ? 1 : 2};
}

// Tile sizes of the backward by warpgroups (backward_wgmma.cuh): rows that stay in shared memory, 64 per warpgroup, and
// a ring of rows that pass; queries with their statistics.
struct WgmmaBackwardShape {
  int e, ev, passing, stages;
  static constexpr int kWarpgroups = 2, kThreads = 128 * (kWarpgroups + 1), kStaying = 64 * kWarpgroups;
  static constexpr int parts = 1;
  constexpr int bytes_of(int rows) const { return bytes_of_lines(rows, e, ev); }
  constexpr int stage_bytes() const { return bytes_of(passing) + 8 * passing + 16; }  // and two barriers
  constexpr int bytes() const { return whole_kib(bytes_of(kStaying) + stages * stage_bytes()); }
};
// Keys that stay have two gradients in registers; queries that stay leave enough for scores of twice as many keys.
constexpr WgmmaBackwardShape wgmma_backward_shape(int e, int ev, Gathers gathers, bool keys_stay) {
  return {e, ev, keys_stay || gathers != Gathers::none ? 32 : 64, 4};
}

// The captured tensors of a mod, then the sizes and strides of each.
struct CapturedCall {
  static constexpr int kGradients = kMaxCaptured;
  const void* tensors[kMaxCaptured];
  int64_t layout[kMaxLayout];
};

using AttentionCall = AttentionCallOf<CapturedCall>;

constexpr int kWgmmaAttentionThreads = WgmmaForwardShape::kThreads;
struct WgmmaPromptCall : AttentionCall {
  static constexpr int kCtas = 1;  // CTAs per multiprocessor
  static constexpr bool kHasPosition = true;
};
struct WgmmaAttentionCall : WgmmaPromptCall {
  static constexpr bool kHasPosition = false;
  static constexpr int32_t position = 0, window = 0;  // 0 in all of its calls
};

}  // namespace lowbit::cuda
