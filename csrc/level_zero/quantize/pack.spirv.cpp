// SPDX-License-Identifier: Apache-2.0
// Packs a float weight to panels, with the kernels of csrc/gpu. Integer formats share those of int8: tools/spirv
// removes the empty kernels of the others.
#define LOWBIT_LANES 16
#include "gpu/quantize/pack.cuh"

namespace lowbit::gpu {

template <Format kFormat, bool kFloats>
constexpr bool kHasKernels = is_float(kFormat) == kFloats && integers_as_int8(kFormat) == kFormat;

#define LOWBIT_FORMAT(name, Codec)                                            \
  LOWBIT_KERNEL(pack_scales_##name, kPackThreads, PackCall) {                 \
    if constexpr (kHasKernels<Format::name, false>) pack_scales<Format::name>(args); \
  }                                                                           \
  LOWBIT_KERNEL(pack_codes_##name, kPackThreads, PackCall) {                  \
    if constexpr (kHasKernels<Format::name, false>) pack_codes<Format::name>(args);  \
  }                                                                           \
  LOWBIT_KERNEL(pack_floats_##name, kPackThreads, PackCall) {                 \
    if constexpr (kHasKernels<Format::name, true>) pack_floats<Format::name>(args);  \
  }
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT

LOWBIT_KERNEL(find_not_finite, kPackThreads, FiniteCall) { all_finite(args); }

}  // namespace lowbit::gpu
