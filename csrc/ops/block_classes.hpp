// SPDX-License-Identifier: Apache-2.0
// Which blocks of a mask are empty, partial or full, without the dense mask: the program is evaluated once per block on intervals (q in q0..q1,
// k in k0..k1), what depends on q or k alone once per row or column of blocks. Blocks that intervals leave undecided are evaluated.
#pragma once

#include "ops/score_program.hpp"

namespace lowbit {

struct BlockGrid {
  int64_t batch = 1, heads = 1, q_length = 0, kv_length = 0, q_block = 128, kv_block = 128;
};

// classes: uint8 [batch, heads, ceil(q_length / q_block), ceil(kv_length / kv_block)], contiguous; 0 empty, 1 partial, 2 full. A block that
// reaches over the end of q or k is never full, as in torch. Returns how many blocks had to be evaluated.
LOWBIT_API int64_t block_classes(const ScoreCall& call, const BlockGrid& grid, const TensorView& classes);

}  // namespace lowbit
