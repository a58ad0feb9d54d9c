// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "ops/block_classes.hpp"

namespace lowbit::cpu {

void classify_blocks(const BlockClassesArgs& args);

}  // namespace lowbit::cpu
