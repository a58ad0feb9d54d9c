// SPDX-License-Identifier: Apache-2.0
// Host code of the forward, for all rows of ops that use it.
#pragma once

#include "ops/attention.hpp"

namespace lowbit::cuda {

// The range of the B * Hq heads from first_head on; position and window as in DecodeArgs.
struct ForwardPart {
  int64_t position = 0, window = 0;
  int64_t first_head = 0, heads = 0;
};

std::string_view refuses_forward(const AttentionForwardArgs& args);
void run_prompt(const AttentionForwardArgs& args, const ForwardPart& part);  // by warpgroups or by tiles

}  // namespace lowbit::cuda
