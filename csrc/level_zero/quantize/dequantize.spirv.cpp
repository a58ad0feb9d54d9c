// SPDX-License-Identifier: Apache-2.0
// All of a packed weight as float32, a kernel for each format.
#include "cuda/quantize/dequantize.cuh"
#include "formats/list.hpp"

namespace lowbit::cuda {

#define LOWBIT_FORMAT(name, Codec) \
  LOWBIT_MODULE_KERNEL(dequantize_##name, 16, kDequantizeThreads, DequantizeCall, dequantize<Format::name>)
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
