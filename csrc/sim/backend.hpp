// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::sim {

// These backends, best first, as those of the simulated devices: what runs in the memory of the host.
std::span<const Backend* const> backends(std::span<const Backend* const> host);

}  // namespace lowbit::sim
