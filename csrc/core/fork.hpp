// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lowbit {

// True in a child that was forked after this library was loaded. Its parent's OpenMP workers do not exist there, and
// libgomp would wait for them forever (parallel.cpp).
bool was_forked();

}  // namespace lowbit
