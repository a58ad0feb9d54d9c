// SPDX-License-Identifier: Apache-2.0
// float8_cast: a matrix as the products of float8 training take it, with torchao's scales and codes.
//
//   scale = float32(largest / max(amax, 1e-12)), or the power of two below it;  scale = power * divisor
//   values = float8(x * scale) / power
//
// A float8 number times a power of two is exact in bfloat16 and float32, so that a product of values, divided by the
// divisors (0.5 to 1, or 1 where scales are powers of two) of both operands, is that of the float8 numbers. Where x is
// not finite, scale and divisor are nan, and so is all that has the scale.
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

// The numbers that have one scale: all, those of a column or of a row. Values of the op's argument `dim`, the dimension
// that a product sums over.
enum class ScaleOf : int64_t { tensor = -1, column = 0, row = 1 };

struct Float8CastArgs {
  Place place{};
  TensorView x;  // [rows, columns] float32, bfloat16 or float16, contiguous
  bool e5m2 = false;  // else e4m3fn
  ScaleOf scale_of = ScaleOf::row;
  bool power_of_2 = false;
  TensorView values{};   // [rows, columns] float32 or bfloat16: written
  TensorView divisor{};  // float32 [1, 1], [1, columns] or [rows, 1]: written
};

// All of the arguments but the results, checked.
LOWBIT_API Float8CastArgs float8_cast_args(const TensorView& x, bool e5m2, int64_t dim, bool power_of_2);
LOWBIT_API Call describe(const Float8CastArgs& args);

}  // namespace lowbit
