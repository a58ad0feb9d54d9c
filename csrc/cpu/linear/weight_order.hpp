// SPDX-License-Identifier: Apache-2.0
// Rows of gather_linear, and pairs of a token and an expert, sorted by weight. Compiled once, for all instruction sets.
#pragma once

#include "core/scratch.hpp"
#include "ops/experts.hpp"
#include "ops/gather_linear.hpp"

namespace lowbit::cpu {

struct WeightOrder {
  int32_t* begin;  // [E + 1]: rows begin[e] .. begin[e + 1] of both lists belong to weight e
  int32_t* y_row;  // [rows], increasing within each weight
  int32_t* x_row;  // [rows]
};

// Raises for an index outside the weights.
void sort_rows(const GatherLinearArgs& args, const WeightOrder& order);

// The pairs of `tokens` tokens from `first` on; y_row counts pairs and x_row tokens, both from there. Pairs with index
// E are skipped. Raises for an index outside the experts.
void sort_pairs(const ExpertsArgs& args, int64_t first, int64_t tokens, const WeightOrder& order);

}  // namespace lowbit::cpu
