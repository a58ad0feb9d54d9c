// SPDX-License-Identifier: Apache-2.0
// float8_cast: a matrix in the form that the products of float8 training take, with torchao's scales and codes.
//
//   scale = float32(largest / max(amax, 1e-12)), or the power of two below it;  scale = power * divisor
//   values = float8(x * scale) / power
//
// A float8 number times a power of two is exact in bfloat16 and float32. So a product of two such values, divided by
// the divisors of both operands (0.5 to 1; 1 for power-of-two scales), equals the product of the float8 numbers. If x
// is not finite, scale and divisor are nan, and so is everything that shares the scale.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

// The numbers that share a scale: the whole tensor, a column or a row. The enumerators are values of the argument
// `dim`, the dimension that the product sums over.
enum class ScaleOf : int64_t { tensor = -1, column = 0, row = 1 };

struct Float8CastArgs {
  Place place{};
  TensorView x;  // [rows, columns] float32, bfloat16 or float16, contiguous
  bool e5m2 = false;  // e5m2, else e4m3fn
  ScaleOf scale_of = ScaleOf::row;
  bool power_of_2 = false;
  TensorView values{};   // [rows, columns] float32 or bfloat16: written
  TensorView divisor{};  // float32 [1, 1], [1, columns] or [rows, 1]: written
};

// Checks all arguments but the results.
LOWBIT_API Float8CastArgs float8_cast_args(const TensorView& x, bool e5m2, int64_t dim, bool power_of_2);
LOWBIT_API Call describe(const Float8CastArgs& args);

}  // namespace lowbit
