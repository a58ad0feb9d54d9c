// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::sim {

// Makes backends of the simulated devices from these, best first; rows run in host memory.
std::span<const Backend* const> backends(std::span<const Backend* const> host);

}  // namespace lowbit::sim
