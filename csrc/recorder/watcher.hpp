// SPDX-License-Identifier: Apache-2.0
// A thread that watches the ring without using Python: if the oldest call has run for longer than a timeout, or on
// SIGUSR1, it writes a dump and one line on stderr.
#pragma once

#include "core/error.hpp"

namespace lowbit::recorder {

LOWBIT_API void watch(double seconds);  // 0: signals alone. A second call changes the timeout. Turns the recorder on
LOWBIT_API bool is_watched();
void watch_new_ring();  // if LOWBIT_RECORD_TIMEOUT is set, or a forked child's parent was watched
void forget_watcher();  // in a forked child, where the thread does not exist

}  // namespace lowbit::recorder
