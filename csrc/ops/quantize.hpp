// SPDX-License-Identifier: Apache-2.0
// quantize, pack, unpack, dequantize: between float weights [n, k], plain codes and the packed panels of
// formats/format.hpp.
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

struct Distortion {
  double signal = 0, noise = 0;  // sum of w * w, and of (w - dequantized) squared
};

struct QuantizeArgs {
  Place place{};
  WeightSpec spec;
  Mapping mapping = Mapping::symmetric;
  TensorView weight;                // [n, k] float32, bfloat16 or float16, contiguous, finite
  TensorView packed;                // uint8 [panels, panel_bytes], contiguous: written
  Distortion* distortion = nullptr;  // written
};

// Plain codes to panels. Codes past those of the format are refused by the row, which reads them.
struct PackArgs {
  Place place{};
  WeightSpec spec;
  TensorView codes;   // uint8 [n, k], contiguous
  TensorView scale;   // float32 [n, groups], contiguous
  TensorView zero;    // likewise; missing when symmetric
  TensorView packed;  // as above: written
};

struct UnpackArgs {
  Place place{};
  WeightSpec spec;
  TensorView packed;              // as above
  TensorView codes, scale, zero;  // as above: written; zero may be missing when symmetric
};

struct DequantizeArgs {
  Place place{};
  WeightSpec spec;
  TensorView packed;  // as above
  TensorView out;     // float32 [n, k], contiguous: written
};

// Whether a float32, bfloat16 or float16 tensor, contiguous, holds no inf and no nan.
struct AllFiniteArgs {
  Place place{};
  TensorView tensor;
  bool* result = nullptr;
};

LOWBIT_API Distortion quantize(const TensorView& weight, const TensorView& packed, const WeightSpec& spec,
                               int64_t mapping);
LOWBIT_API void pack(PackArgs args);
LOWBIT_API void unpack(UnpackArgs args);
LOWBIT_API void dequantize(const TensorView& packed, const WeightSpec& spec, const TensorView& out);
LOWBIT_API bool all_finite(const TensorView& tensor);
[[noreturn]] LOWBIT_API void refuse_code(int code, int highest);  // for rows of pack

}  // namespace lowbit
