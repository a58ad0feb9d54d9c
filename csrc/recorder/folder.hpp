// SPDX-License-Identifier: Apache-2.0
// The folder of the recorder's files, and the removal of old files.
#pragma once

#include "core/os.hpp"

namespace lowbit::recorder {

// Creates a file of `bytes` for this process and maps it.
os::MappedFile make_file(std::size_t bytes);

}  // namespace lowbit::recorder
