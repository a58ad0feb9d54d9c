// SPDX-License-Identifier: Apache-2.0
#include "ops/float8_cast.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

Float8CastArgs float8_cast_args(const TensorView& x, bool e5m2, int64_t dim, bool power_of_2) {
  constexpr std::string_view op = "float8_cast";
  const Place place = place_of(op, {{"x", x}});
  check_activation(op, "x", x);
  check(x.rank == 2, value, op, ": x must have shape [rows, columns], got ", shape_text(x));
  check_contiguous(op, "x", x);
  check(dim >= -1 && dim <= 1, value, op, ": dim must be 0, 1, or -1 for one scale, got ", dim);
  return {.place = place, .x = x, .e5m2 = e5m2, .scale_of = static_cast<ScaleOf>(dim), .power_of_2 = power_of_2};
}

Call describe(const Float8CastArgs& args) {
  return Call{.read = bytes_of(args.x), .written = bytes_of(args.values) + bytes_of(args.divisor)}
      .with(args.x, args.values);
}

}  // namespace lowbit
