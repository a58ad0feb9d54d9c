// SPDX-License-Identifier: Apache-2.0
// Arguments of the kernels of experts: the same text for host and device.
//
// Pairs (token, expert) become rows, in the order of experts. The rows of an expert begin a block, a multiple of the
// rows of a product's CTA, so that a CTA has rows of one expert: one launch multiplies all experts. The host does not
// know how many blocks an expert has, and launches as many as there may be. Rows without a pair are zeros, and CTAs
// without a row end at once.
#pragma once

#include "cuda/linear/call.hpp"

namespace lowbit::cuda {

constexpr int kMaxExperts = 2048;  // two counters each, in shared memory

// Gate of ops/experts.hpp, whose header is not for the device.
enum class GateActivation : int32_t { none, relu, gelu, gelu_tanh, silu, relu_squared };
struct GateCall {
  GateActivation activation;
  bool gated, interleaved;
  float alpha, limit, up_offset;
};

struct ExpertsCall {
  const void *x, *index, *weights;
  DType dtype, index_dtype, weights_dtype;
  GateCall gate;
  int32_t experts, each;         // experts of a token
  int64_t tokens, width, inner, n;  // of x, hidden and y
  int32_t blocks, rows_of_block;
  int32_t *expert_of_block;  // [blocks], or -1
  int32_t *pair_of_row;      // [rows], or -1
  int32_t *row_of_pair;      // [pairs], or -1 for a pair of no expert
  void *rows, *hidden, *y;   // [rows, width], [rows, inner], [tokens, n], of dtype
  ProductCall product;       // of the kernel: m is the number of rows; weight and bias are those of expert 0
  int64_t weight_bytes;      // of an expert

  constexpr int64_t pairs() const { return tokens * each; }
  constexpr int64_t all_rows() const { return int64_t{blocks} * rows_of_block; }
};

}  // namespace lowbit::cuda
