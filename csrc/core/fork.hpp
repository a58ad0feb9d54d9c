// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lowbit {

// True in a child that was forked after this library was loaded: the workers of OpenMP that its parent had are not
// there, and libgomp would wait for them for ever (parallel.cpp).
bool was_forked();

}  // namespace lowbit
