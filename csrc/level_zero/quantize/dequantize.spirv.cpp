// SPDX-License-Identifier: Apache-2.0
// All of a packed weight, or rows that are named, a kernel for each format.
#define LOWBIT_LANES 16
#include "cuda/quantize/dequantize.cuh"
#include "formats/list.hpp"

namespace lowbit::cuda {

#define LOWBIT_FORMAT(name, Codec) \
  LOWBIT_KERNEL(dequantize_##name, kDequantizeThreads, DequantizeCall) { \
    dequantize<Format::name, PanelLayout>(args); \
  }
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
