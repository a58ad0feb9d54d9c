// SPDX-License-Identifier: Apache-2.0
// Programs that run_program keeps (run_program.cpp), by a number that their owner asks for and gives back.
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit::torch {

LOWBIT_API int64_t new_program_number();
LOWBIT_API void forget_program(int64_t number);  // a call that runs it now ends as it would

}  // namespace lowbit::torch
