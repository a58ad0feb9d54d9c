// SPDX-License-Identifier: Apache-2.0
// Macros and functions for the row tables of all units. A unit is a file cpu/<op>/<unit>.cpp with one function
// <op>_<unit>_rows; csrc/cpu/CMakeLists.txt lists the instruction sets that have it.
#pragma once

#include "ops/kernel.hpp"

#define LOWBIT_STRING_OF(name) #name
#define LOWBIT_STRING(name) LOWBIT_STRING_OF(name)
// The name of a row on this instruction set: LOWBIT_ROW("linear_int4") is "linear_int4_avx2".
#define LOWBIT_ROW(what) what "_" LOWBIT_STRING(LOWBIT_ISA_NAME)

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class Args>
[[maybe_unused]] std::string_view never_refuses(const Args&) { return ""; }

// A single row is `static constexpr`: constructing it on the stack would use instructions of this unit, which the
// processor may not have.
template <class Args, std::size_t count>
LOWBIT_INLINE void add(Backend& backend, const Kernel<Args> (&rows)[count]) { add_rows(backend, rows, count); }

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
