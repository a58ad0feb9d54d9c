// SPDX-License-Identifier: Apache-2.0
// sample: the next token for each row of logits, with transformers' processors in transformers' order, in float32:
//
//   repetition penalty p of the ids so far: x < 0 ? x * p : x / p, once per id
//   temperature: x / temperature; at 0 the result is the argmax (ties: the first), and the rest is skipped
//   top-k: tokens with logits below the k-th largest get probability 0
//   top-p: so do those that follow, in descending order (ties: the last first), once the mass of the rest reaches top_p
//   min-p: so do those below min_p times the largest probability
//
// The result is the first token at which the cumulative probability exceeds u times the total. u, 0 <= u < 1, is a
// function of seed, position and row (Philox), so that results do not depend on threads.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

struct SampleArgs {
  Place place{};
  TensorView logits;       // [B, V] float32, bfloat16 or float16, contiguous; the row refuses nan
  TensorView ids;          // [B, L] int32 or int64, contiguous: 0 to V - 1, or -1; checked by the row; or no ids
  double temperature = 1;
  int64_t top_k = 0;       // 0: all
  double top_p = 1, min_p = 0, repetition_penalty = 1;
  int64_t seed = 0, position = 0;
  TensorView y{};          // [B] int64, contiguous: written
};

// Checks all arguments but y, except the numbers in the tensors.
LOWBIT_API SampleArgs sample_args(const SampleArgs& given);
LOWBIT_API Call describe(const SampleArgs& args);

}  // namespace lowbit
