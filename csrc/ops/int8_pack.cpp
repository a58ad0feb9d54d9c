// SPDX-License-Identifier: Apache-2.0
#include "ops/int8_pack.hpp"

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

Int8PackArgs int8_pack_args(const TensorView& weight) {
  constexpr std::string_view op = "int8_pack";
  const Place place = place_of(op, {{"weight", weight}});
  check_activation(op, "weight", weight);
  check(weight.rank == 2, value, op, ": weight must have shape [n, k], got ", shape_text(weight));
  if (!in_columns(weight)) check_contiguous(op, "weight", weight);
  const auto format = static_cast<int64_t>(Format::int8);
  return {.place = place, .spec = weight_spec(op, weight.size(0), weight.size(1), format, 0, false), .weight = weight};
}

Call describe(const Int8PackArgs& args) {
  return Call{.read = bytes_of(args.weight), .written = bytes_of(args.packed)}.with(args.weight, args.packed);
}

}  // namespace lowbit
