// SPDX-License-Identifier: Apache-2.0
// What posix.cpp needs of linux.cpp or macos.cpp.
#pragma once

#include <cstddef>

namespace lowbit::os {

int allocate_blocks(int descriptor, std::size_t bytes);  // of a file that is to have so many; errno, or 0
extern const int kMapAtOnce;                             // a flag of mmap: with all pages

}  // namespace lowbit::os
