// SPDX-License-Identifier: Apache-2.0
// Scratch memory of the calling thread: 64-byte aligned, kept between calls, grown when needed, freed when the thread ends.
#pragma once

#include <cstddef>

namespace lowbit {

enum class Scratch { activations, tile, count };

void* scratch(Scratch slot, std::size_t bytes);

}  // namespace lowbit
