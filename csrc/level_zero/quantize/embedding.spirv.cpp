// SPDX-License-Identifier: Apache-2.0
// Rows of a row-major weight, such as an embedding; kernels as in dequantize.spirv.cpp.
#define LOWBIT_LANES 16
#include "formats/list.hpp"
#include "gpu/quantize/dequantize.cuh"

namespace lowbit::gpu {

#define LOWBIT_FORMAT(name, Codec)                                              \
  LOWBIT_KERNEL(dequantize_##name, kDequantizeThreads, DequantizeCall) {        \
    if constexpr (integers_as_int8(Format::name) == Format::name)               \
      dequantize<Format::name, RowMajorLayout, is_integer(Format::name)>(args); \
  }
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::gpu
