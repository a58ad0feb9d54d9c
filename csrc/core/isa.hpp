// SPDX-License-Identifier: Apache-2.0
// The instruction sets that this CPU can run. An instruction set is a set of features, not a rung of a ladder:
// avx2_vnni and avx512 both include avx2, and neither includes the other.
#pragma once

#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

LOWBIT_API std::string_view
detected_isa();  // the best set whose features the CPU and the OS report (which must save the registers too)
LOWBIT_API std::string_view
chosen_isa();    // the best set that LOWBIT_ISA allows; it can only take features away
LOWBIT_API std::string isa_reason();         // why the chosen set is not the detected one, or ""

// Whether cores read memory faster as several concurrent streams than as one. Intel's do: each of their prefetchers
// follows reads within 4 KiB (figures: csrc/cpu/panel.hpp).
LOWBIT_API bool reads_in_streams();
// Whether one stream that is prefetched into L2 is faster than four into L1: AMD's processors (measured on Zen 4 and 5,
// csrc/cpu/panel.hpp).
LOWBIT_API bool reads_through_l2();

LOWBIT_API std::string isa_unavailable(std::string_view isa);  // why code for this set cannot run, or ""

}  // namespace lowbit
