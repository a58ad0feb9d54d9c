// SPDX-License-Identifier: Apache-2.0
// An attention call in the form that the CPU's tiles take: the caller's arguments, and what its row read
// from memory (in_memory.hpp).
#pragma once

#include "ops/attention.hpp"

namespace lowbit::cpu {

struct ScoreGradientPlan;  // captured_gradients.hpp

// The class of a block of q_block queries and kv_block keys.
enum class BlockClass : uint8_t { empty, partial, full };  // partial: mask_mod decides; full: mask_mod is true

struct BlockClasses {
  const BlockClass* classes = nullptr;  // [B or 1, Hq or 1, q blocks, kv blocks]; null: every block is full
  int64_t batch_stride = 0, head_stride = 0, columns = 0;
  int64_t q_block = 0, kv_block = 0;

  const BlockClass* row(int64_t b, int64_t h, int64_t q_block_index) const {
    return classes + b * batch_stride + h * head_stride + q_block_index * columns;
  }
};

// Queries per tile of the backward; gradients of captured tensors are divided along the same tiles.
constexpr int64_t kBackwardQTile = 64;

struct ForwardCall : AttentionForwardArgs {
  BlockClasses blocks{};
  uint64_t key = 0;  // Philox key from seed
  // The scales of a prompt over codes (prompt.hpp).
  TensorView k_scale{}, v_scale{};
  bool rotated = false;
  int64_t position = 0, window = 0;
  bool on_one_thread = false;  // within a parallel region, where no other may open
};

struct BackwardCall : AttentionGradients {
  ForwardCall forward{};
  const ScoreGradientPlan* captured = nullptr;  // plan of grad_captured, or null
};

}  // namespace lowbit::cpu
