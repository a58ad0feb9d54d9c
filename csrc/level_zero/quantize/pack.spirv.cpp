// SPDX-License-Identifier: Apache-2.0
// A float weight to packed panels, by the kernels of CUDA: one of all integer formats, one of each other.
#define LOWBIT_LANES 16
#include "cuda/quantize/pack.cuh"

namespace lowbit::cuda {

#define LOWBIT_CODED(name)                                                                              \
  LOWBIT_KERNEL(pack_scales_##name, kPackThreads, PackCall) { pack_scales<Format::name>(args); } \
  LOWBIT_KERNEL(pack_codes_##name, kPackThreads, PackCall) { pack_codes<Format::name>(args); }
LOWBIT_CODED(int8)
LOWBIT_CODED(nf4)
LOWBIT_CODED(fp4)
LOWBIT_CODED(fp4_e2m1)
LOWBIT_CODED(fp8_e4m3)
#undef LOWBIT_CODED

#define LOWBIT_FLOATS(name) \
  LOWBIT_KERNEL(pack_floats_##name, kPackThreads, PackCall) { pack_floats<Format::name>(args); }
LOWBIT_FLOATS(float32)
LOWBIT_FLOATS(bfloat16)
LOWBIT_FLOATS(float16)
#undef LOWBIT_FLOATS

LOWBIT_KERNEL(find_not_finite, kPackThreads, FiniteCall) { all_finite(args); }

}  // namespace lowbit::cuda
