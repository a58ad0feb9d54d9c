// SPDX-License-Identifier: Apache-2.0
// Rows of gather_linear sorted by weight. Compiled once, for all instruction sets.
#pragma once

#include "core/scratch.hpp"
#include "ops/gather_linear.hpp"

namespace lowbit::cpu {

struct WeightOrder {
  int32_t* begin;  // [E + 1]: rows begin[e] .. begin[e + 1] of the two lists belong to weight e
  int32_t* y_row;  // [rows], increasing for each weight
  int32_t* x_row;  // [rows]
};

// Raises where index names no weight.
void sort_rows(const GatherLinearArgs& args, const WeightOrder& order);

}  // namespace lowbit::cpu
