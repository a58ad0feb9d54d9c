// SPDX-License-Identifier: Apache-2.0
// Arguments of the attention kernels: the same text for host and device.
#pragma once

#include "core/dtype.hpp"
#include "ops/tiling.hpp"

namespace lowbit::gpu {

constexpr int kAttentionThreads = 128;
constexpr float kLog2e = 1.4426950408889634f;
constexpr int kMaxHeadDim = 256;

// [B, H, length, columns], dense in the last dimension: strides in elements.
struct HeadRows {
  void* data;
  int64_t batch, head, row;
};

struct ListCall {  // blocks to visit: [B, H, q blocks] and [.., kv blocks], int32
  const int32_t *counts, *indices;
  int64_t count_stride[3], index_stride[4], most;
};

// Accumulator of a captured tensor's gradient (captured.cuh), and where the result goes.
struct alignas(8) ExactSum {
  unsigned long long high, low;
  float special;
};
struct CapturedGradientCall {
  ExactSum* sums;  // [copies][count], or null: not wanted
  void* to;
  int64_t count, copies;  // CTAs alternate between copies of a small tensor
  DType dtype;
};

// Per-query numbers for the backward: D, and lse, or 0 where that is -inf.
struct alignas(8) RowStatistics {
  float lse, delta;
  // From this magnitude on, at most 13 bits of lse are after the binary point: probabilities do not add up to 1.
  LOWBIT_INLINE bool has_rest() const {
    const float magnitude = lse < 0 ? -lse : lse;
    return magnitude >= 1024.0f && magnitude <= 0x1.fffffep127f;
  }
};

// Captured: the device's list of a mod's captured tensors, with the number of those that may have gradients.
template <class Captured>
struct AttentionCallOf {
  HeadRows q{}, k{}, v{}, out{}, grad_out{}, grad_q{}, grad_k{}, grad_v{};
  Tiling q_tiles, kv_tiles;
  int32_t batch = 0, heads = 0, group = 0;
  int32_t first_head = 0, launched_heads = 0;  // range of the B * Hq heads: a forward launch may cover some of them
  // Forward only: query i is at position + i, and attends to no key `window` (> 0) or more positions before it.
  int32_t position = 0, window = 0;
  bool causal = false;
  DType out_dtype = DType::other;  // dtype of out and given
  float scale = 0;
  float *lse = nullptr, *max_scores = nullptr;
  const float *sink = nullptr, *grad_lse = nullptr;
  const void* bias = nullptr;  // the mask of the call, of dtype Mods::kBias
  int64_t bias_stride[4] = {};
  const int64_t* seed = nullptr;
  uint64_t dropped = 0;  // threshold for 32-bit random draws
  float kept = 0;        // factor of a probability that is not dropped
  Captured score{}, mask{};
  int32_t* fault = nullptr;  // set by the mods (score/print.hpp)
  // Classes of blocks (ops/attention.hpp), [B or 1, Hq or 1, q blocks, kv blocks], made from the lists; strides.
  uint8_t* classes = nullptr;
  int64_t class_batch = 0, class_head = 0, class_columns = 0, class_rows = 0, class_heads = 0;
  ListCall lists[2] = {};  // partial, full
  // backward only
  HeadRows given{};  // grad_out as the caller gave it; grad_out: in 16 bits
  RowStatistics* statistics = nullptr;  // [B, Hq, L]
  float* unit = nullptr;  // [B, Hq, L]: factor of the probabilities of rows with a large lse (has_rest)
  float* grad_sink = nullptr;
  CapturedGradientCall gradients[Captured::kGradients] = {};
  uint32_t* largest = nullptr;  // [kMaxCaptured]: bits of the largest value added to each
  int32_t sum_bits = 0;         // accumulator bits for the largest value
  bool adds = false;            // false: only finds the largest
};

}  // namespace lowbit::gpu
