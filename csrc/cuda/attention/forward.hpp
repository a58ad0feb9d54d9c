// SPDX-License-Identifier: Apache-2.0
// The forward on the host, for the rows of ops that lead to it.
#pragma once

#include "ops/attention.hpp"

namespace lowbit::cuda {

// Of the B times Hq heads those from first_head on; a position and a window as DecodeArgs has them.
struct ForwardPart {
  int64_t position = 0, window = 0;
  int64_t first_head = 0, heads = 0;
};

std::string_view refuses_forward(const AttentionForwardArgs& args);
void run_prompt(const AttentionForwardArgs& args, const ForwardPart& part);  // by warpgroups or by tiles

}  // namespace lowbit::cuda
