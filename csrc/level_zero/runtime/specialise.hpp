// SPDX-License-Identifier: Apache-2.0
// Numbers that become constants of a module before a device compiles it (device/specialise.hpp).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lowbit::level_zero {

// A SPIR-V module in which each 32-bit OpSpecConstant has the value constants[its SpecId]; those with larger ids keep
// their own.
std::vector<uint32_t> specialised(std::vector<uint32_t> module, std::span<const int32_t> constants);

}  // namespace lowbit::level_zero
