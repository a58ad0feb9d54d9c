// SPDX-License-Identifier: Apache-2.0
// The mods and the block mask of one attention call, as all callers pass them: lists of integers and views. Checked
// here, used by attention.
#pragma once

#include <optional>
#include <vector>

#include "core/error.hpp"
#include "ops/attention.hpp"
#include "ops/score_program.hpp"

namespace lowbit {

struct ModCode {
  std::span<const int64_t> code;     // empty: no mod
  std::vector<TensorView> captured;
};

class AttentionMods {
 public:
  // blocks: kv_num_blocks, kv_indices and perhaps full_kv_num_blocks, full_kv_indices; or nothing.
  AttentionMods(std::string_view op, const ModCode& score_mod, const ModCode& mask_mod,
                std::span<const TensorView> blocks = {}, std::pair<int64_t, int64_t> block_size = {0, 0}) {
    if (!score_mod.code.empty()) score_mod_.emplace(op, "score_mod", score_mod.code, score_mod.captured);
    if (!mask_mod.code.empty()) mask_mod_.emplace(op, "mask_mod", mask_mod.code, mask_mod.captured);
    check(!score_mod_ || !score_mod_->program().is_mask, ErrorKind::value, op,
          ": score_mod must be a program with a float result");
    check(!mask_mod_ || mask_mod_->program().is_mask, ErrorKind::value, op,
          ": mask_mod must be a program with a bool result");
    check(blocks.size() == 0 || blocks.size() == 2 || blocks.size() == 4, ErrorKind::value, op,
          ": blocks must be kv_num_blocks, kv_indices and perhaps full_kv_num_blocks, full_kv_indices, got ",
          blocks.size(), " tensors");
    if (blocks.size() >= 2) lists.kv_num_blocks = blocks[0], lists.kv_indices = blocks[1];
    if (blocks.size() == 4) lists.full_kv_num_blocks = blocks[2], lists.full_kv_indices = blocks[3];
    lists.q_block = block_size.first, lists.kv_block = block_size.second;
  }
  const ScoreCall* score_mod() const { return score_mod_ ? &*score_mod_ : nullptr; }
  const ScoreCall* mask_mod() const { return mask_mod_ ? &*mask_mod_ : nullptr; }
  BlockLists lists;

 private:
  std::optional<ScoreCall> score_mod_, mask_mod_;
};

}  // namespace lowbit
