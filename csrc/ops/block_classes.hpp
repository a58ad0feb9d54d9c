// SPDX-License-Identifier: Apache-2.0
// block_classes: finds the empty, partial and full blocks of a mask, without the dense mask.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"
#include "score/program.hpp"

namespace lowbit {

struct BlockGrid {
  int64_t batch = 1, heads = 1, q_length = 0, kv_length = 0, q_block = 128, kv_block = 128;
};

struct BlockClassesArgs {
  Place place{};
  const ScoreCall* call = nullptr;  // a mask_mod
  BlockGrid grid;
  TensorView classes;  // uint8 [batch, heads, q blocks, kv blocks], contiguous, written: 0 empty, 1 partial, 2 full
  int64_t* evaluated = nullptr;  // written: number of blocks evaluated
};

// A block that extends past the end of q or k is never full, as in torch. Returns the number of blocks evaluated.
LOWBIT_API int64_t block_classes(const ScoreCall& call, const BlockGrid& grid, const TensorView& classes);

LOWBIT_API Call describe(const BlockClassesArgs& args);

}  // namespace lowbit
