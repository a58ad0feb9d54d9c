// SPDX-License-Identifier: Apache-2.0
// Large pages for memory that is about to be written.
#pragma once

#include <cstdint>

namespace lowbit {

// Asks the system to back these bytes by large pages where no page is yet. It is only a wish: only speed depends on it.
// Memory of 64 MB that malloc has just got takes 16,384 faults of small pages, 25 to 50 ms on the virtual machines that
// this was measured on (Sapphire Rapids): more than all that a row computes in it.
void prefer_huge_pages(void* data, int64_t bytes);

}  // namespace lowbit
