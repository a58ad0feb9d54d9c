// SPDX-License-Identifier: Apache-2.0
// On the host: the call of the kernel that dequantizes all of a weight or some rows of it.
#pragma once

#include "gpu/quantize/call.hpp"
#include "ops/quantize.hpp"

namespace lowbit::gpu {

inline DequantizeCall dequantize_call(const DequantizeArgs& args, int64_t* outside) {
  return {.spec = args.spec,
          .sections = args.indices ? args.sections : PanelLayout::sections(args.spec),
          .weight = args.packed.as<const uint8_t>(),
          .indices = args.indices.data,
          .out = args.out.data,
          .outside = outside,
          .index_dtype = args.indices.dtype,
          .dtype = args.out.dtype,
          .bits = bits(args.spec.format)};
}

}  // namespace lowbit::gpu
