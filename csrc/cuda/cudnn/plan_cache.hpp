// SPDX-License-Identifier: Apache-2.0
// The plans of this process, and their images on disk.
#pragma once

#include "core/place.hpp"
#include "cuda/cudnn/plan.hpp"

namespace lowbit::cuda {

// Kept until the process ends, even if refused by cuDNN: a CUDA graph may hold its kernels. Does not require the
// device's context, which it makes current to make a plan.
const Plan& plan_for(const AttentionShape& shape, const Place& place);

}  // namespace lowbit::cuda
