// SPDX-License-Identifier: Apache-2.0
// Host code that makes the arguments of the dequantize kernel, for a whole weight or some of its rows.
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
