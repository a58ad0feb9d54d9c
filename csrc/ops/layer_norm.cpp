// SPDX-License-Identifier: Apache-2.0
#include "ops/layer_norm.hpp"

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/rms_norm.hpp"

namespace lowbit {

using enum ErrorKind;

LayerNormArgs layer_norm_args(const TensorView& x, const TensorView& weight, const TensorView& bias, double eps,
                              double offset, const TensorView& add) {
  constexpr std::string_view op = "layer_norm";
  const Place place = place_of(op, {{"x", x}, {"weight", weight}, {"bias", bias}, {"add", add}});
  check_activation(op, "x", x);
  check(x.rank >= 1, value, op, ": x must have shape [..., n], got ", shape_text(x));
  check_contiguous(op, "x", x);
  for (const auto& [name, tensor] : {NamedTensor{"weight", weight}, {"bias", bias}}) {
    if (!tensor) continue;
    check_activation(op, name, tensor);
    check_shape(op, name, tensor, {x.size(-1)});
    check_contiguous(op, name, tensor);
  }
  check_norm(op, eps, offset);
  if (add) {
    check_dtype(op, "add", add, x.dtype);
    check_shape(op, "add", add, shape_text(x).sizes);
    check_contiguous(op, "add", add);
  }
  return {.place = place, .x = x, .weight = weight, .bias = bias, .eps = eps, .offset = offset, .add = add, .y = {}};
}

Call describe(const LayerNormArgs& args) {
  return Call{.read = bytes_of(args.x) + bytes_of(args.weight) + bytes_of(args.bias) + bytes_of(args.add),
              .written = bytes_of(args.y)}
      .with(args.x, args.y);
}

}  // namespace lowbit
