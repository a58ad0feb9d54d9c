// SPDX-License-Identifier: Apache-2.0
// What is before and behind the products of a library: the kernels of CUDA.
#define LOWBIT_LANES 32
#include "cuda/linear/decoded.cuh"

namespace lowbit::cuda {

LOWBIT_KERNEL(code_rows_int8, kLinearThreads, DecodedCall) { code_rows(args); }
LOWBIT_KERNEL(finish_floats, kLinearThreads, DecodedCall) { finish_products<Format::float32, false>(args); }
LOWBIT_KERNEL(finish_coded, kLinearThreads, DecodedCall) { finish_products<Format::int8, false>(args); }
LOWBIT_KERNEL(finish_codes, kLinearThreads, DecodedCall) { finish_products<Format::int8, true>(args); }

LOWBIT_KERNEL(decode_codes, kLinearThreads, DecodedCall) { decode_columns<Format::int8, true, true>(args); }
LOWBIT_KERNEL(decode_int8, kLinearThreads, DecodedCall) { decode_columns<Format::int8, false, true>(args); }
#define LOWBIT_FORMAT(name) \
  LOWBIT_KERNEL(decode_##name, kLinearThreads, DecodedCall) { decode_columns<Format::name, false>(args); }
LOWBIT_OTHER_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

}  // namespace lowbit::cuda
