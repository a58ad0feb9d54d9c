// SPDX-License-Identifier: Apache-2.0
// All of a packed weight, or rows that are named, one kernel for all integer formats.
#define LOWBIT_LANES 16
#include "cuda/quantize/dequantize.cuh"
#include "formats/list.hpp"

namespace lowbit::cuda {

LOWBIT_KERNEL(dequantize_int8, kDequantizeThreads, DequantizeCall) {
  dequantize<Format::int8, PanelLayout, true>(args);
}
#define LOWBIT_FORMAT(name) \
  LOWBIT_KERNEL(dequantize_##name, kDequantizeThreads, DequantizeCall) { dequantize<Format::name, PanelLayout>(args); }
LOWBIT_OTHER_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
