// SPDX-License-Identifier: Apache-2.0
// How many formats and rules there were when tools/spirv made the modules beside this, and wrote it.
#pragma once

namespace lowbit::level_zero {

constexpr int kFormatsOfModules = 14, kRulesOfModules = 3;

}  // namespace lowbit::level_zero
