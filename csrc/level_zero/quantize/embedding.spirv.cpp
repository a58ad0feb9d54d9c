// SPDX-License-Identifier: Apache-2.0
// Rows of a weight that lies row by row, as those of embeddings do, one kernel for all integer formats.
#define LOWBIT_LANES 16
#include "cuda/quantize/dequantize.cuh"
#include "formats/list.hpp"

namespace lowbit::cuda {

LOWBIT_KERNEL(dequantize_int8, kDequantizeThreads, DequantizeCall) {
  dequantize<Format::int8, RowMajorLayout, true>(args);
}
#define LOWBIT_FORMAT(name) \
  LOWBIT_KERNEL(dequantize_##name, kDequantizeThreads, DequantizeCall) { \
    dequantize<Format::name, RowMajorLayout>(args);                      \
  }
LOWBIT_OTHER_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
