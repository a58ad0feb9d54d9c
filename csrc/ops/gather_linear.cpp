// SPDX-License-Identifier: Apache-2.0
#include "ops/gather_linear.hpp"

#include <algorithm>

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

GatherLinearArgs gather_linear_args(const GatherLinearArgs& given, int64_t x_format_) {
  constexpr std::string_view op = "gather_linear";
  GatherLinearArgs args = given;
  const auto& [place, spec, x_format_of_args, x, weight, index, bias, y] = args;
  args.place = place_of(op, {{"x", x}, {"weight", weight}, {"index", index}, {"bias", bias}});
  args.x_format = x_format(x_format_, spec);
  check_activation(op, "x", x);
  check_contiguous(op, "x", x);
  check(index.dtype == DType::int32 || index.dtype == DType::int64, type, op, ": index must be int32 or int64, got ",
        name_of(index.dtype));
  check(index.rank == 2, value, op, ": index must have shape [T, J], got ", shape_text(index));
  check_contiguous(op, "index", index);
  check(index.numel() <= INT32_MAX, value, op, ": index must have fewer than 2^31 elements, got ", index.numel());
  const bool of_tokens = x.rank == 2 && x.size(0) == index.size(0),
             of_rows = x.rank == 3 && x.size(0) == index.size(0) && x.size(1) == index.size(1);
  check((of_tokens || of_rows) && x.size(-1) == spec.k, value, op, ": x must have shape [T, k] or [T, J, k], here ",
        shape_text({index.size(0), spec.k}), " or ", shape_text({index.size(0), index.size(1), spec.k}), ", got ",
        shape_text(x));
  check(weight.dtype == DType::uint8, type, op, ": weight must be packed uint8, got ", name_of(weight.dtype));
  check(weight.rank == 3 && weight.size(0) >= 1, value, op, ": weight must have shape [E, panels, panel_bytes], E at ",
        "least 1, got ", shape_text(weight));
  check_shape(op, "weight", weight, {weight.size(0), spec.panels(), spec.panel_bytes()});
  check_contiguous(op, "weight", weight);
  if (bias) {
    check_activation(op, "bias", bias);
    check_tensor(op, "bias", bias, bias.dtype, {weight.size(0), spec.n});
  }
  return args;
}

// Each row may have its own weight: min(number of rows, E) weights.
Call describe(const GatherLinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  return Call{.arithmetic = stays_float(args.x_format) ? Arithmetic::floating : Arithmetic::integer,
              .read = bytes_of(args.x) + bytes_of(args.index) + bytes_of(args.bias) +
                      std::min(args.rows(), args.weights()) * spec.panels() * spec.panel_bytes(),
              .written = bytes_of(args.y),
              .operations = 2 * args.rows() * spec.n * spec.k}
      .with(args.x, args.weight, args.y);
}

}  // namespace lowbit
