// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::level_zero {

// Rows for memory of the host, where a driver of tests runs kernels on it (runtime/device.hpp); else none. There is no
// device of torch for Intel GPUs yet.
std::span<const Backend* const> emulated_backends();

void add_linear_rows(Backend& backend);

}  // namespace lowbit::level_zero
