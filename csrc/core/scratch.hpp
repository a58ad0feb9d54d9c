// SPDX-License-Identifier: Apache-2.0
// Scratch memory of the calling thread: 64-byte aligned, kept between calls, grown when needed, freed when
// the thread ends.
#pragma once

#include <cstddef>

namespace lowbit {

// Two, because the thread that makes a call also works on its tasks. call: what all tasks of a call share. task: what
// one task needs for itself.
enum class Scratch { call, task, count };

void* scratch(Scratch slot, std::size_t bytes);

}  // namespace lowbit
