// SPDX-License-Identifier: Apache-2.0
// A thread that looks at the ring, and never at Python: where the oldest call runs for longer than a timeout, or
// SIGUSR1 has come, it writes a dump and one line on stderr.
#pragma once

#include "core/error.hpp"

namespace lowbit::recorder {

LOWBIT_API void watch(double seconds);  // 0: signals alone. Again: another timeout. Starts a recorder that is off
LOWBIT_API bool is_watched();
void watch_new_ring();  // if LOWBIT_RECORD_TIMEOUT says so, or the parent of a forked child was watched
void forget_watcher();  // in a forked child, which has no thread that watches

}  // namespace lowbit::recorder
