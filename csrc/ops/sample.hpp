// SPDX-License-Identifier: Apache-2.0
// sample: the next token of each row of logits, with the processors of transformers in their order, in float32:
//
//   repetition penalty p of the ids so far: x < 0 ? x * p : x / p, once for each id
//   temperature: x / temperature; at 0 the first of the largest is the answer, and nothing below is done
//   top-k: what is smaller than the k-th largest has no probability
//   top-p: nor has what comes, in falling order (of equal ones the last first), after a mass of top_p of the rest
//   min-p: nor what has less than min_p of the largest probability
//
// The answer is the first token up to which the probabilities add up to more than u of their sum. u, 0 <= u < 1, is a
// function of seed, position and row (Philox), so that results do not depend on threads.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct SampleArgs {
  Place place{};
  TensorView logits;       // [B, V] float32, bfloat16 or float16, contiguous; the row checks that none is nan
  TensorView ids;          // [B, L] int32 or int64, contiguous: 0 to V - 1, or -1, which the row checks; or no ids
  double temperature = 1;
  int64_t top_k = 0;       // 0: all
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 0, position = 0;
  TensorView y{};          // [B] int64, contiguous: written
};

// All of the arguments but y, checked, the numbers in the tensors left out.
LOWBIT_API SampleArgs sample_args(const SampleArgs& given);
LOWBIT_API Call describe(const SampleArgs& args);

}  // namespace lowbit
