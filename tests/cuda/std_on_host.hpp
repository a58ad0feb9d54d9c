// SPDX-License-Identifier: Apache-2.0
// The C++ library of device sources on the host. A kernel gets no more of it than NVRTC gives: g++ reads that in 0.01 s,
// and its own library, precompiled, in 0.13 s, for each kernel anew. What is no kernel has the whole library.
// Included by cuda_on_host.hpp.
#pragma once

#ifdef LOWBIT_EMULATED_KERNEL
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/device/std.cuh"

using int64_t = long;
using uint64_t = unsigned long;
using uintptr_t = unsigned long;

namespace std {

using ::fmax;
using ::fmin;
using ::memcpy;
using ::pow;
using ::sqrt;

}  // namespace std
#else
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#endif
