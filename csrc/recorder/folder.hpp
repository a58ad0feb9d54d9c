// SPDX-License-Identifier: Apache-2.0
// The folder of the recorder's files, and the removal of old files.
#pragma once

#include <string>

namespace lowbit::recorder {

struct Opened {
  int descriptor = -1;  // locked while the process lives
  std::string path, reason;
};

// Creates a file of `bytes` for this process, with its blocks allocated, so that writes to the mapping cannot run out
// of disk.
Opened make_file(std::size_t bytes);

}  // namespace lowbit::recorder
