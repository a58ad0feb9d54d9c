// SPDX-License-Identifier: Apache-2.0
// Replaces plan.cpp in a build without the headers of cuDNN.
#include "cuda/cudnn/plan.hpp"

namespace lowbit::cuda {
namespace {

constexpr char kReason[] = "lowbit was built without the headers of cuDNN and cudnn-frontend (docs/ops/cuda.md)";

}  // namespace

bool has_cudnn_frontend() { return false; }
Plan make_plan(const AttentionShape&, const CudnnDevice&) { return {.graph = nullptr, .refused = kReason}; }
std::string image_of(const Plan&) { return ""; }
Plan read_plan(const std::string&, const CudnnDevice&) { return {.graph = nullptr, .refused = kReason}; }
void run_plan(const Plan&, CudnnHandle, const AttentionTensors&, void*) { throw Error(ErrorKind::runtime, kReason); }

}  // namespace lowbit::cuda
