// SPDX-License-Identifier: Apache-2.0
// SPIR-V by columns, as tools/spirv writes it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/error.hpp"

namespace lowbit::level_zero {

// The words of a module of which these are the columns.
LOWBIT_API std::vector<uint32_t> from_columns(std::span<const uint8_t> bytes);

}  // namespace lowbit::level_zero
