// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::sim {

// The backends of the CPU, best first, as those of the simulated devices.
std::span<const Backend* const> backends(std::span<const Backend* const> cpu);

}  // namespace lowbit::sim
