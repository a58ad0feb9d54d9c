// SPDX-License-Identifier: Apache-2.0
// A score program as the source of device functions. They do what the machine does for one score, step by step, from
// the same structs (score/ops.hpp):
//
//   float score_mod(float score, int b, int h, int q, int k, t0, t1 .., layout, fault)
//   float score_mod_gradient(float score, float gradient, int b, int h, int q, int k, t0 .., d0 .., layout, fault)
//
// The first returns the modified score, of a mask (mask_mod) the score or -inf. The second is given the gradient of the
// modified score, returns that of the raw one and adds to the gradients of the captured tensors.
//
//   t<n>      elements of captured tensor n, of its dtype; its layout may be any
//   d<n>      float tensors: where the gradient is added up, contiguous float32 of the tensor's shape; or null
//   layout    per captured tensor its sizes, then its strides in elements: int64
//   fault     4 ints, zero before: 1, then the tensor, the dimension and the index of the first gather out of range,
//             or -1 for an integer divided by zero
//
// Or as a struct of the same names in CUDA C, in which a value of a low rate (score/graph.hpp) is not computed for
// every score. Its members are t0 .., d0 .., layout, fault, b, h, then what of_head() makes of them:
//
//   Row of_row(int q), Column of_column(int k), Diagonal of_diagonal(int q, int k)
//   float of_score(float score, float gradient, int q, int k, row, column, diagonal)  gradient: of the second alone
//   float operator()(float score, float gradient, int q, int k)  all of that for one score
#pragma once

#include <string>

#include "score/program.hpp"

namespace lowbit {

enum class SourceLanguage : uint8_t { cuda, opencl };

// The text that printed functions need: once per source file, before them and after all headers (its words are macros).
// Where it does not add, the file says itself what a GRADIENT is (the type of d<n>), and has add_to(GRADIENT, float),
// tanh_of(float) and note_fault(fault, tensor, dim, index).
LOWBIT_API std::string score_source_prelude(SourceLanguage language, bool adds = true);
// One function: the gradient where `gradient`.
LOWBIT_API std::string score_source(const ScoreCall& call, SourceLanguage language, bool gradient);
std::string score_struct(const ScoreCall& call, bool gradient);

}  // namespace lowbit
