// SPDX-License-Identifier: Apache-2.0
// The steps of a program that work on single heads. Latent attention is made of them: each head has its own matrix, and
// the heads of queries and keys are put together from columns that different steps write.
#pragma once

#include "ops/gather_linear.hpp"
#include "ops/program_operand.hpp"
#include "ops/rope_append.hpp"

namespace lowbit {

// Normalizes, rotates or copies heads: rope_append without keys and values. The heads are `size` columns of x [B, L, n]
// each, from `column` on, `step` columns apart. They go to the columns of as many heads from into_column on: of the
// result [B, L, heads m] `into`, or of the state [B, heads, S, m] `into`, whose tokens from a start on they become.
// Without `into` the result is [B, L, heads size].
struct HeadsStep {
  Operand x, cos, sin, weight, into;
  int64_t heads = 0, size = 0, column = 0, step = 0;
  int64_t into_column = 0, start = -1;  // start: index into ProgramTensors::starts, of a state
  double eps = 0, offset = 0;
  int64_t rotation = 0;
};
// y[b, t, h] = x[b, t, h] @ w[h].T: gather_linear in which head h has weight h. x [B, L, heads k]; the result is
// [B, L, heads n].
struct HeadLinearStep {
  Operand x, weight;
  WeightSpec spec;
  int64_t x_format = 0;
};

struct HeadsArgs : RopeAppendArgs {};  // `rotated` are columns of `into` or, without an address, the step's result

// The checked arguments of a step, given what its operands are. `start` is the number of tokens in front of the new
// ones.
HeadsArgs step_args(const HeadsStep& step, const TensorView& x, const TensorView& cos, const TensorView& sin,
                    const TensorView& weight, const TensorView& into, int64_t start);
// The index has no address.
GatherLinearArgs step_args(const HeadLinearStep& step, const TensorView& x, const TensorView& weight);
// Runs the call, with the index 0, 1, .. for each token.
void run_by_head(GatherLinearArgs args);

}  // namespace lowbit
