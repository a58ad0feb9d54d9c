// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/error.hpp"

namespace lowbit::cuda {

// Max bytes of decoded keys and values at a time, unless one head needs more; tests set less.
LOWBIT_API extern int64_t max_decoded_bytes;

}  // namespace lowbit::cuda
