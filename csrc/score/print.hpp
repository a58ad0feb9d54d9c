// SPDX-License-Identifier: Apache-2.0
// Prints a score program as the source of device functions. They do what the machine does for one score, step by step,
// from the same structs (score/ops.hpp):
//
//   float score_mod(float score, int b, int h, int q, int k, t0, t1 .., layout, fault)
//   float score_mod_gradient(float score, float gradient, int b, int h, int q, int k, t0 .., d0 .., layout, fault)
//
// The first returns the modified score; for a mask (mask_mod) the score or -inf. The second takes the gradient of the
// modified score, returns that of the raw one, and adds to the gradients of the captured tensors.
//
//   t<n>      elements of captured tensor n, in its dtype; any layout
//   d<n>      float tensors: accumulator of the gradient, contiguous float32 in the tensor's shape; or null
//   layout    per captured tensor its sizes, then its strides in elements: int64
//   fault     4 ints, initially zero: 1, then the tensor, the dimension and the index of the first gather out of range,
//             or -1 for an integer divided by zero
//
// Or as a struct with the same names in CUDA C, which does not compute a value of a low rate (score/graph.hpp) for
// every score. Its members are t0 .., d0 .., layout, fault, b, h, then those computed by of_head():
//
//   Row of_row(int q), Column of_column(int k), Diagonal of_diagonal(int q, int k)
//   float of_score(float score, float gradient, int q, int k, row, column, diagonal)  gradient: only in the second
//   float operator()(float score, float gradient, int q, int k)  all of that for one score
#pragma once

#include <string>

#include "score/program.hpp"

namespace lowbit {

enum class SourceLanguage : uint8_t { cuda, opencl };

// The text that printed functions need: once per source file, before them and after all headers (its names are macros).
// Unless it adds gradients, the file itself must define GRADIENT (the type of d<n>), add_to(GRADIENT, float),
// tanh_of(float) and note_fault(fault, tensor, dim, index).
LOWBIT_API std::string score_source_prelude(SourceLanguage language, bool adds = true);
// Prints one function: the gradient if `gradient`.
LOWBIT_API std::string score_source(const ScoreCall& call, SourceLanguage language, bool gradient);
std::string score_struct(const ScoreCall& call, bool gradient);

}  // namespace lowbit
