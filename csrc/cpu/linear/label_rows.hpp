// SPDX-License-Identifier: Apache-2.0
// The rows of linear_cross_entropy that have a label. Compiled once, for all instruction sets.
#pragma once

#include "ops/linear_cross_entropy.hpp"

namespace lowbit::cpu {

// Writes the numbers of these rows, and returns how many they are. Raises for a label that is outside of the vocabulary
// and not ignore_index.
int64_t find_label_rows(const LinearCrossEntropyArgs& args, int32_t* rows);

}  // namespace lowbit::cpu
