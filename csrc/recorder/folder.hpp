// SPDX-License-Identifier: Apache-2.0
// The folder of recorders' files, and the removal of old ones.
#pragma once

#include <string>

namespace lowbit::recorder {

struct Opened {
  int descriptor = -1;  // locked while the process lives
  std::string path, reason;
};

// A new file of `bytes` for this process, with its blocks: a write into the mapping finds room on the disk.
Opened make_file(std::size_t bytes);

}  // namespace lowbit::recorder
