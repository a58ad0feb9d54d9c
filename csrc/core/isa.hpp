// SPDX-License-Identifier: Apache-2.0
// The instruction sets that this CPU can run. An instruction set is a set of features, not a step of a ladder:
// avx2_vnni and avx512 both contain avx2, neither the other.
#pragma once

#include <string>
#include <string_view>

#include "core/error.hpp"

namespace lowbit {

LOWBIT_API std::string_view
detected_isa();  // the best whose features cpuid and xgetbv show (the OS must save the registers too)
LOWBIT_API std::string_view
chosen_isa();    // the best that LOWBIT_ISA leaves: it takes features away, and never adds one
LOWBIT_API std::string isa_reason();         // why the chosen one is not the detected one; "" if it is

// Whether cores read memory faster in several places at a time than in one. Intel's do: each of their prefetchers
// follows the reads inside of 4 KiB. (csrc/cpu/panel.hpp has figures.)
LOWBIT_API bool reads_in_streams();
// Whether one stream that is prefetched into L2 is faster than four into L1, where both keep up with memory: AMD's
// processors before Zen 5, which reads as fast in four. (Measured on Zen 4 and 5: csrc/cpu/panel.hpp.)
LOWBIT_API bool reads_through_l2();

LOWBIT_API std::string isa_unavailable(std::string_view isa);  // why code for it must not run; "" if it may

}  // namespace lowbit
