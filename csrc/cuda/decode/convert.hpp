// SPDX-License-Identifier: Apache-2.0
// Codes of a cache to rows of floats on the host, for the rows of ops that need them.
#pragma once

#include "ops/decode.hpp"

namespace lowbit::cuda {

// Of the B times H heads those from `first` on, `heads` of them.
void run_dequantize(const KvDequantizeArgs& args, int64_t first, int64_t heads);

}  // namespace lowbit::cuda
