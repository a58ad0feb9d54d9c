// SPDX-License-Identifier: Apache-2.0
// The list of backends in this build, best first: the only file with #if LOWBIT_WITH_*.

#include "cpu/backend.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

std::span<const Backend* const> backends() { return cpu::backends(); }

}  // namespace lowbit
