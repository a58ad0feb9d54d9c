// SPDX-License-Identifier: Apache-2.0
// The sources of the kernels of optimizers: a few lines that name a specialisation of the headers beside this.
#pragma once

#include <vector>

#include "cuda/runtime/program.hpp"
#include "formats/state_format.hpp"
#include "rules/list.hpp"

namespace lowbit::cuda {

inline constexpr int kFloatBlock = 256;  // of formats without scales: elements are dealt out as in blocks of 256

Source step_source(Rule rule, int moments, StateFormat format, int64_t block_size);
Source convert_source(StateFormat format, bool is_signed, int64_t block_size);

// What training with the optimizers' defaults uses.
LOWBIT_API std::vector<Source> common_sources();

}  // namespace lowbit::cuda
