// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm.hpp"

#include <cmath>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

void check_norm(std::string_view op, double eps, double offset) {
  check(std::isfinite(eps) && eps >= 0, value, op, ": eps must be finite and not negative, got ", eps);
  check(std::isfinite(offset), value, op, ": offset must be finite, got ", offset);
}

RmsNormArgs rms_norm_args(const TensorView& x, const TensorView& weight, double eps, double offset,
                          const TensorView& add) {
  constexpr std::string_view op = "rms_norm";
  const Place place = place_of(op, {{"x", x}, {"weight", weight}, {"add", add}});
  check_activation(op, "x", x);
  check(x.rank >= 1, value, op, ": x must have shape [..., n], got ", shape_text(x));
  check_contiguous(op, "x", x);
  check_activation(op, "weight", weight);
  check_shape(op, "weight", weight, {x.size(-1)});
  check_contiguous(op, "weight", weight);
  check_norm(op, eps, offset);
  if (add) {
    check_dtype(op, "add", add, x.dtype);
    check_shape(op, "add", add, shape_text(x).sizes);
    check_contiguous(op, "add", add);
  }
  return {.place = place, .x = x, .weight = weight, .eps = eps, .offset = offset, .add = add, .y = {}};
}

Call describe(const RmsNormArgs& args) {
  return Call{.read = bytes_of(args.x) + bytes_of(args.weight) + bytes_of(args.add), .written = bytes_of(args.y)}
      .with(args.x, args.y);
}

}  // namespace lowbit
