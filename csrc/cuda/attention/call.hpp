// SPDX-License-Identifier: Apache-2.0
// What the kernels of attention get, the same text for host and device, and the sizes of their tiles.
#pragma once

#include "core/dtype.hpp"
#include "ops/tiling.hpp"

namespace lowbit::cuda {

constexpr int kAttentionThreads = 128, kAttentionWarps = kAttentionThreads / 32;
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kMostHeadDim = 256;
constexpr int kMostCaptured = 16, kMostLayout = 96;  // tensors of a mod; their sizes and strides together
constexpr int kRowPad = 8;  // behind each row in shared memory: eight rows lie in different banks

// Of the forward: a warp has 16 row_tiles queries. As much as 255 registers hold: the sums of the result, and a
// tile of scores.
struct ForwardShape {
  int e, ev, row_tiles, kv_tile;
  bool keeps_q;  // in registers
  constexpr int q_tile() const { return 16 * row_tiles * kAttentionWarps; }
  constexpr int bytes() const { return 2 * ((q_tile() + kv_tile) * (e + kRowPad) + kv_tile * (ev + kRowPad)); }
};
constexpr ForwardShape forward_shape(int e, int ev, bool plain) {
  const int most = e > ev ? e : ev;
  const int row_tiles = most <= 64 || (plain && most <= 128) ? 2 : 1;
  return {e, ev, row_tiles, most <= 128 && (most <= 64 || row_tiles == 1) ? 64 : 32, row_tiles == 1 && e <= 128};
}

// Of the backward: 64 rows stay, and tiles of `passing` rows of the other side pass. Head dims above 128 are made by
// `parts` CTAs.
struct BackwardShape {
  int e, ev, passing, stages, parts;
  static constexpr int kStaying = 16 * kAttentionWarps;
  constexpr int bytes() const { return 2 * (kStaying + stages * passing) * (e + ev + 2 * kRowPad); }
};
constexpr BackwardShape backward_shape(int e, int ev) {
  const int most = e > ev ? e : ev;
  return {e, ev, most <= 128 ? 32 : 16, 2, most <= 128 ? 1 : 2};
}

// [B, H, length, columns], dense in the last: strides in elements.
struct HeadRows {
  void* data;
  int64_t batch, head, row;
};

// What a mod captured: its tensors, then per tensor sizes and strides.
struct CapturedCall {
  static constexpr int kGradients = kMostCaptured;
  const void* tensors[kMostCaptured];
  int64_t layout[kMostLayout];
};

struct ListCall {  // of blocks: [B, H, q blocks] and [.., kv blocks], int32
  const int32_t *counts, *indices;
  int64_t count_stride[3], index_stride[4], most;
};

// The gradient of a captured tensor while it is added up (captured.cuh), and where it goes.
struct alignas(8) ExactSum {
  unsigned long long high, low;
  float special;
};
struct CapturedGradientCall {
  ExactSum* sums;  // [copies][count], or null: not wanted
  void* to;
  int64_t count, copies;  // CTAs add to copies of a small tensor in turn
  DType dtype;
};

// What the backward knows of a query: D, and lse, or 0 where that is -inf.
struct alignas(8) RowStatistics {
  float lse, delta;
  // From here on no more than 13 bits of lse lie behind the point: its probabilities do not add up to 1.
  LOWBIT_INLINE bool has_rest() const {
    const float magnitude = lse < 0 ? -lse : lse;
    return magnitude >= 1024.0f && magnitude <= 0x1.fffffep127f;
  }
};

// Captured: how it says what a mod captured, and how many of them may have gradients.
template <class Captured>
struct AttentionCallOf {
  HeadRows q{}, k{}, v{}, out{}, grad_out{}, grad_q{}, grad_k{}, grad_v{};
  Tiling q_tiles, kv_tiles;
  int32_t batch = 0, heads = 0, group = 0;
  bool causal = false;
  DType out_dtype = DType::other;  // of out and given
  float scale = 0;
  float *lse = nullptr, *max_scores = nullptr;
  const float *sink = nullptr, *grad_lse = nullptr;
  const void* bias = nullptr;  // the mask of the call, of Mods::kBias
  int64_t bias_stride[4] = {};
  const int64_t* seed = nullptr;
  uint64_t dropped = 0;  // of 2^32 draws
  float kept = 0;        // what is not dropped is multiplied by
  Captured score{}, mask{};
  int32_t* fault = nullptr;  // of the mods (score/print.hpp)
  // Classes of blocks (ops/attention.hpp), [B or 1, Hq or 1, q blocks, kv blocks], made of the lists; strides.
  uint8_t* classes = nullptr;
  int64_t class_batch = 0, class_head = 0, class_columns = 0, class_rows = 0, class_heads = 0;
  ListCall lists[2] = {};  // partial, full
  // of the backward
  HeadRows given{};  // what grad_out is, or is made of where it is float32
  RowStatistics* statistics = nullptr;  // [B, Hq, L]
  float* unit = nullptr;  // [B, Hq, L]: of rows of large lse (has_rest), what their probabilities are multiplied by
  float* grad_sink = nullptr;
  CapturedGradientCall gradients[Captured::kGradients] = {};
  uint32_t* largest = nullptr;  // [kMostCaptured]: bits of what is added to each
  int32_t sum_bits = 0;         // of sums for the largest value
  bool adds = false;            // or finds the largest
};
using AttentionCall = AttentionCallOf<CapturedCall>;

}  // namespace lowbit::cuda
