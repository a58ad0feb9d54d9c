// SPDX-License-Identifier: Apache-2.0
// quantize: between float weights [n, k], plain codes and the packed panels of formats/format.hpp.
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

// How a scale is chosen. symmetric: amax over half the range, as torchao (the largest weight clips by half a step);
// symmetric_no_clipping_err: no weight clips; asymmetric: min..max widened to contain 0, with an integer zero point.
enum class Mapping : int { symmetric, symmetric_no_clipping_err, asymmetric };
inline constexpr std::string_view kMappingNames[] = {"symmetric", "symmetric_no_clipping_err", "asymmetric"};

enum class Direction : int { quantize, pack, unpack, dequantize };

struct QuantizeArgs {
  Place place{};
  Direction direction = Direction::quantize;
  WeightSpec spec;
  Mapping mapping = Mapping::symmetric;
  DType dtype = DType::float32;      // of weight
  const void* weight = nullptr;      // quantize: [n, k], in
  uint8_t* packed = nullptr;         // [panels, panel_bytes]
  float* dequantized = nullptr;      // dequantize: [n, k], out
  uint8_t* codes = nullptr;          // pack (in), unpack (out): [n, k]; float formats have none
  float* scale = nullptr;            // [n, groups]
  float* zero = nullptr;             // [n, groups]; null when symmetric
  double* signal = nullptr;          // quantize, out: sum of w * w
  double* noise = nullptr;           // quantize, out: sum of (w - dequantized) squared
};

struct Distortion {
  double signal, noise;
};
LOWBIT_API Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec, int64_t mapping);
LOWBIT_API void pack(const TensorView& codes, const TensorView& scale, const TensorView& zero, const TensorView& packed, const WeightSpec& spec);
LOWBIT_API void unpack(const TensorView& packed, const WeightSpec& spec, const TensorView& codes, const TensorView& scale, const TensorView& zero);
LOWBIT_API void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out);
LOWBIT_API bool all_finite(const TensorView& tensor);

}  // namespace lowbit
