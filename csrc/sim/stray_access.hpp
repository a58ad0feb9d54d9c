// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace lowbit::sim {

// From now on an access without permission in [base, base + bytes) is explained on stderr, then goes to the handler before ours (faulthandler
// shows the Python stack). Device i owns `per_device` bytes from base + i * per_device.
void watch_for_stray_access(const void* base, std::size_t bytes, std::size_t per_device);

}  // namespace lowbit::sim
