// SPDX-License-Identifier: Apache-2.0
#include "ops/rms_norm.hpp"

#include <cmath>

#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

void check_norm(std::string_view op, double eps, double offset) {
  check(std::isfinite(eps) && eps >= 0, value, op, ": eps must be finite and not negative, got ", eps);
  check(std::isfinite(offset), value, op, ": offset must be finite, got ", offset);
}

RmsNormArgs rms_norm_args(const TensorView& x, const TensorView& weight, double eps, double offset,
                          const TensorView& add) {
  const Place place = place_of("rms_norm", {{"x", x}, {"weight", weight}, {"add", add}});
  check(is_activation(x.dtype), type, "rms_norm: x must be float32, bfloat16 or float16, got ", name_of(x.dtype));
  check(x.rank >= 1 && x.is_contiguous(), value, "rms_norm: x must be contiguous [..., n], got ", shape_text(x));
  check(is_activation(weight.dtype), type, "rms_norm: weight must be float32, bfloat16 or float16, got ",
        name_of(weight.dtype));
  check(weight.rank == 1 && weight.size(0) == x.size(-1) && weight.is_contiguous(), value,
        "rms_norm: weight must be a contiguous [n=", x.size(-1), "], got ", shape_text(weight));
  check_norm("rms_norm", eps, offset);
  if (add) {
    check(add.dtype == x.dtype, type, "rms_norm: add must have the dtype of x, got ", name_of(add.dtype), " and ",
          name_of(x.dtype));
    check(add.rank == x.rank && add.shape == x.shape && add.is_contiguous(), value,
          "rms_norm: add must be contiguous, of the shape of x, got ", shape_text(add), " and ", shape_text(x));
  }
  return {.place = place, .x = x, .weight = weight, .eps = eps, .offset = offset, .add = add, .y = {}};
}

Call describe(const RmsNormArgs& args) {
  Call call{.read = bytes_of(args.x) + bytes_of(args.weight) + bytes_of(args.add), .written = bytes_of(args.y)};
  call.add(args.x), call.add(args.y);
  return call;
}

}  // namespace lowbit
