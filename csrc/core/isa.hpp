// SPDX-License-Identifier: Apache-2.0
// What this CPU can run. Levels are ordered: each one contains those before it.
#pragma once

#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

enum class Isa { scalar, avx2, avx512, avx512_vnni };

LOWBIT_API std::string_view name_of(Isa isa);

LOWBIT_API Isa detected_isa();       // cpuid and xgetbv (the OS must save the registers too), read once
LOWBIT_API Isa chosen_isa();         // detected_isa(), lowered by LOWBIT_ISA; never raised
LOWBIT_API std::string isa_reason();  // why the chosen level is not the detected one; "" if it is

}  // namespace lowbit
