// SPDX-License-Identifier: Apache-2.0
// Numbers that are constants when a device compiles a module: the host writes them into its SPIR-V (OpSpecConstant,
// runtime/specialise.hpp), so that one module serves every format, and unused code is not compiled.
#pragma once

#include "core/bits.hpp"

namespace lowbit::level_zero {

__attribute__((device, const)) int32_t specialised(int32_t id, int32_t otherwise)
    __asm__("_Z20__spirv_SpecConstantii");

}  // namespace lowbit::level_zero
