// SPDX-License-Identifier: Apache-2.0
// A call of an op as cuDNN gets it: the shape of its plan, and its tensors.
#pragma once

#include "cuda/cudnn/plan.hpp"
#include "ops/attention.hpp"
#include "ops/decode.hpp"

namespace lowbit::cuda {

struct CudnnCall {
  AttentionShape shape{};
  AttentionTensors tensors{};
};

LOWBIT_API CudnnCall cudnn_call(const AttentionForwardArgs& args);
LOWBIT_API CudnnCall cudnn_call(const AttentionBackwardArgs& args);
// Requires queries that are not behind the last key. Keys that no query sees are left out, so that a cache that is
// longer than its window needs one plan.
LOWBIT_API CudnnCall cudnn_call(const DecodeArgs& args);

// Launched after a plan with a bias (hidden_rows.hpp).
LOWBIT_API void clear_hidden_rows(const CudnnCall& call, const Place& place);

}  // namespace lowbit::cuda
