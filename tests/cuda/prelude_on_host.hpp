// SPDX-License-Identifier: Apache-2.0
// The words of cuda/device/prelude.cuh for the sources of csrc/gpu, on the host. Included by cuda_on_host.hpp.
#pragma once

namespace lowbit::gpu {

float float_of_half(uint32_t bits);
uint32_t pair_of_bf16(float low, float high);
uint32_t pair_of_f16(float low, float high);
void fail();

}  // namespace lowbit::gpu

namespace lowbit::cuda {

using namespace gpu;

}  // namespace lowbit::cuda
