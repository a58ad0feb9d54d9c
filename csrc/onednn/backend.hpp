// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::onednn {

// oneDNN on the CPU, if its library is installed. Listing its rows does not load the library, which is loaded when one
// of them is first asked whether it can run. Calls that take an earlier row never ask.
std::span<const Backend* const> backends();

}  // namespace lowbit::onednn
