// SPDX-License-Identifier: Apache-2.0
// linear: y[m,n] = act(sum_k x[m,k] * w[n,k] + bias[n]) * mul[m,n] + add[m,n]. w is packed (formats/format.hpp).
// In a program an adapter may add a product of low rank before the activation (LowRank).
#pragma once

#include <span>
#include <string_view>

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

// What an adapter adds to the sums: sum_r inner[m, column + r] * up[n, r]. inner is the product of x and the adapter's
// first factor, which serves several products and is a call of its own. Outputs that several layers computed before their
// weights were joined (q, k and v) are in parts, each with columns of its own.
struct LowRank {
  static constexpr int kParts = 4;
  struct Part {
    int64_t end = 0;      // the outputs before this one, from the end of the part before on
    int64_t column = -1;  // their first column of inner; -1: nothing is added to them
  };
  const void* inner = nullptr;  // [m, width], of the dtype of x
  const void* up = nullptr;     // [panels, rank, 16], zero behind output n
  DType up_dtype = DType::float32;
  int64_t width = 0, rank = 0;  // rank 0: there is no adapter
  Part parts[kParts];

  explicit operator bool() const { return rank > 0; }
};

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
  LowRank low_rank;
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

inline constexpr std::string_view kNoLowRank = "an adapter's product of low rank";  // why rows refuse a call
// Adds an adapter to the arguments of a call.
LOWBIT_API void add_low_rank(LinearArgs& args, const TensorView& inner, const TensorView& up,
                             std::span<const LowRank::Part> parts);

LOWBIT_API Call describe(const LinearArgs& args);

}  // namespace lowbit
