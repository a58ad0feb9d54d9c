// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::gpu {}

namespace lowbit::cuda {

using namespace gpu;

// NVIDIA GPUs, from compute capability 8.0 on. Listing it loads nothing: the driver is opened by the first call with a
// tensor on such a device.
std::span<const Backend* const> backends();

// True if LOWBIT_CUDA_PATH leads to a driver that runs kernels on the host (tests/cuda): then these rows can
// serve host memory.
bool is_emulated();

void add_cudnn_rows(Backend& backend);  // first of those of attention
void add_planned_cudnn_rows(Backend& backend);  // last of those of attention and decode
void add_attention_rows(Backend& backend);
void add_prompt_rows(Backend& backend);  // first of those of decode
void add_decode_rows(Backend& backend);
void add_cache_rows(Backend& backend);
void add_linear_rows(Backend& backend);
void add_experts_rows(Backend& backend);
void add_linear_rows_of_warpgroups(Backend& backend);  // first of those of linear; those for many rows second
void add_linear_rows_of_many(Backend& backend);
void add_optim_rows(Backend& backend);
void add_pack_rows(Backend& backend);
void add_quantize_rows(Backend& backend);

}  // namespace lowbit::cuda
