// SPDX-License-Identifier: Apache-2.0
// Host code that dequantizes a cache, for the rows of ops that need it.
#pragma once

#include "ops/decode.hpp"

namespace lowbit::cuda {

// The range of the B * H heads from `first` on, `heads` of them.
void run_dequantize(const KvDequantizeArgs& args, int64_t first, int64_t heads);

}  // namespace lowbit::cuda
