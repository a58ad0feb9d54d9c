// SPDX-License-Identifier: Apache-2.0
#include "ops/pointwise.hpp"

#include <algorithm>
#include <cmath>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

PointwiseArgs pointwise_args(const TensorView& x, int64_t function, double scale, const TensorView& add,
                             double positive, double negative, double linear, const TensorView& gate,
                             std::string_view op, std::optional<DType> result) {
  const Place place = place_of(op, {{"x", x}, {"add", add}, {"gate", gate}});
  check_activation(op, "x", x);
  check_contiguous(op, "x", x);
  check(function >= 0 && function < kPointwiseFunctions, value, op, ": function must be 0 to ",
        kPointwiseFunctions - 1, ", got ", function);
  for (const auto& [name, number] : {std::pair<std::string_view, double>{"scale", scale},
                                     {"positive", positive},
                                     {"negative", negative},
                                     {"linear", linear}})
    check(std::isfinite(number), value, op, ": ", name, " must be finite, got ", number);
  if (add) {
    check_dtype(op, "add", add, result && add.dtype == *result ? *result : x.dtype);
    check_shape(op, "add", add, shape_text(x).sizes);
    check_contiguous(op, "add", add);
  }
  if (gate) {
    check_dtype(op, "gate", gate, x.dtype);
    const bool of_rows = gate.rank >= 1 && gate.size(-1) == 1 && gate.numel() * x.size(-1) == x.numel();
    check(of_rows || std::ranges::equal(shape_text(gate).sizes, shape_text(x).sizes), value, op,
          ": gate must have one element for each row of x, or the shape of x, got ", shape_text(gate), " for ",
          shape_text(x));
    if (of_rows) check_contiguous(op, "gate", gate);
    else check_dense_rows(op, "gate", gate);
  }
  return {.place = place, .x = x, .function = static_cast<Pointwise>(function), .scale = scale, .add = add,
          .positive = positive, .negative = negative, .linear = linear, .y = {}, .gate = gate};
}

Call describe(const PointwiseArgs& args) {
  return Call{.read = bytes_of(args.x) + bytes_of(args.add) + bytes_of(args.gate), .written = bytes_of(args.y)}.with(args.x, args.y);
}

}  // namespace lowbit
