// SPDX-License-Identifier: Apache-2.0
// Programs kept by run_program (run_program.cpp), under numbers that their owner obtains and releases.
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit::torch {

LOWBIT_API int64_t new_program_number();
LOWBIT_API void forget_program(int64_t number);  // a running call of it still completes

}  // namespace lowbit::torch
