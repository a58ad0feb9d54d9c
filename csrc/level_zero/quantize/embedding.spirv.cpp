// SPDX-License-Identifier: Apache-2.0
// Rows of a weight that lies row by row, as those of embeddings do, a kernel for each format.
#define LOWBIT_LANES 16
#include "cuda/quantize/dequantize.cuh"
#include "formats/list.hpp"

namespace lowbit::cuda {

#define LOWBIT_FORMAT(name, Codec) \
  LOWBIT_KERNEL(dequantize_##name, kDequantizeThreads, DequantizeCall) { \
    dequantize<Format::name, RowMajorLayout>(args); \
  }
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
