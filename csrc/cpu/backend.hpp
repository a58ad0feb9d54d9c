// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::cpu {

std::span<const Backend* const> backends();  // one per compiled ISA, best first

}  // namespace lowbit::cpu
