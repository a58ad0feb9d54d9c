// SPDX-License-Identifier: Apache-2.0
// linear: y[m,n] = act(sum_k x[m,k] * w[n,k] + bias[n]) * mul[m,n] + add[m,n]. w is packed (formats/format.hpp).
#pragma once

#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

struct LinearArgs {
  Place place{};
  int64_t m = 0;
  WeightSpec weight_spec;
  XFormat x_format = XFormat::floating;
  Activation activation = Activation::none;
  DType dtype = DType::float32;       // dtype of x, y, mul and add
  DType bias_dtype = DType::float32;
  const void* x = nullptr;            // [m, k]
  const uint8_t* weight = nullptr;    // [panels, panel_bytes]
  const void* bias = nullptr;         // [n] or null
  const void* mul = nullptr;          // [m, n] or null
  const void* add = nullptr;          // [m, n] or null
  void* y = nullptr;                  // [m, n]
};

// The arguments as a caller gives them; checked here, once, for every binding.
struct LinearTensors {
  TensorView x, weight, bias, mul, add, y;  // x [..., k]; y [..., n]; bias, mul, add may be absent
};

LOWBIT_API WeightSpec weight_spec(std::string_view op, int64_t n, int64_t k, int64_t format, int64_t group_size,
                                  bool asymmetric);
LOWBIT_API XFormat x_format(int64_t value, const WeightSpec& spec);
LOWBIT_API void check_weight(std::string_view op, const TensorView& weight, const WeightSpec& spec);
LOWBIT_API LinearArgs linear_args(const LinearTensors& tensors, const WeightSpec& spec, int64_t x_format,
                                  int64_t activation);

LOWBIT_API Call describe(const LinearArgs& args);

}  // namespace lowbit
