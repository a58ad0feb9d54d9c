// SPDX-License-Identifier: Apache-2.0
// int2, int3, int5, int6 and int7, in planes. Kernels unpack a panel of them to the bytes of int8 and continue with
// these (cpu/planes.hpp): the five formats need no kernels of their own.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

template <int kBits>
struct IntX : IntegerCodec<kBits> {
  static constexpr int smallest_group = 16;  // group size of GGUF's Q2_K, Q3_K and Q6_K
};

}  // namespace lowbit
