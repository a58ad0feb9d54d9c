// SPDX-License-Identifier: Apache-2.0
// int2, int3, int5, int6 and int7, in planes. Kernels unpack a panel of them to the bytes of int8 and go on as with
// those (cpu/planes.hpp): the five cost no kernels of their own.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

template <int kBits>
struct IntX : IntegerCodec<kBits> {
  static constexpr int smallest_group = 16;  // of GGUF's Q2_K, Q3_K and Q6_K
};

}  // namespace lowbit
