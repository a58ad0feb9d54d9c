// SPDX-License-Identifier: Apache-2.0
// The plans of this process, and their images on disk.
#pragma once

#include "core/place.hpp"
#include "cuda/cudnn/plan.hpp"

namespace lowbit::cuda {

// Kept for as long as the process lives, also one that cuDNN refuses: a CUDA graph may hold the kernels of it. Without
// the device's context, which it makes the current one to make a plan.
const Plan& plan_for(const AttentionShape& shape, const Place& place);

}  // namespace lowbit::cuda
