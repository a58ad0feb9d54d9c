// SPDX-License-Identifier: Apache-2.0
// Host code that makes the arguments of the kernels that pack a weight from those of an op, and adds up their sums.
#pragma once

#include <algorithm>
#include <vector>

#include "gpu/quantize/pack_call.hpp"
#include "ops/quantize.hpp"

namespace lowbit::gpu {

// Device memory of a call, in bytes from its start. The sums come first.
struct PackRoom {
  int64_t sums, scale, zero, levels, all;
};

inline PackRoom room_of(const WeightSpec& spec) {
  const int64_t numbers = is_float(spec.format) ? 0 : spec.panels() * spec.groups() * kPanelColumns,
                sums = round_up(spec.panels() * 3 * 4, 64);
  return {.sums = 0, .scale = sums, .zero = sums + numbers * 4, .levels = sums + numbers * 8,
          .all = sums + numbers * 16};
}

inline PackCall pack_call(const QuantizeArgs& args, void* memory) {
  const WeightSpec& spec = args.spec;
  const PackRoom room = room_of(spec);
  char* const at = static_cast<char*>(memory);
  return {.to = PanelLayout::sections(spec),
          .n = spec.n,
          .k = spec.k,
          .padded_k = spec.padded_k(),
          .groups = spec.groups(),
          .group_k = spec.group_k(),
          .bits = bits(spec.format),
          .code_max = static_cast<float>(code_max(spec.format)),
          .symmetric_zero = static_cast<float>(symmetric_zero(spec.format)),
          .mapping = args.mapping,
          .dtype = args.weight.dtype,
          .asymmetric = spec.asymmetric,
          .half_scales = spec.group_size != 0,
          .searches = args.searches(),
          .weight = args.weight.data,
          .importance = args.importance.as<const float>(),
          .packed = args.packed.as<uint8_t>(),
          .scale = reinterpret_cast<float*>(at + room.scale),
          .zero = reinterpret_cast<float*>(at + room.zero),
          .levels = reinterpret_cast<int64_t*>(at + room.levels),
          .sums = reinterpret_cast<float*>(at + room.sums)};
}

// The sums of all panels, in order.
inline Distortion total(const std::vector<float>& sums) {
  Distortion of;
  for (std::size_t i = 0; i < sums.size(); i += 3)
    of.signal += sums[i], of.noise += sums[i + 1], of.absmax_noise += sums[i + 2];
  return of;
}

inline FiniteCall finite_call(const AllFiniteArgs& args, void* memory) {
  return {.data = args.tensor.data, .count = args.tensor.numel(), .dtype = args.tensor.dtype,
          .found = static_cast<int32_t*>(memory)};
}
// Whether no CTA has found an inf or a nan.
inline bool is_finite(const std::vector<int32_t>& found) {
  return std::all_of(found.begin(), found.end(), [](int32_t of) { return of == 0; });
}
inline int64_t finite_ctas(const AllFiniteArgs& args) {
  return smaller(kMaxFiniteCtas, ceil_div(args.tensor.numel(), kFiniteStretch));
}

}  // namespace lowbit::gpu
