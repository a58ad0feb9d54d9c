// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/kernel.hpp"

namespace lowbit::onednn {

// oneDNN on the CPU, where its library is installed. Listing the rows of oneDNN does not load the library. It is loaded
// the first time one of them is asked whether it can run, and calls that take an earlier row never ask.
std::span<const Backend* const> backends();

}  // namespace lowbit::onednn
