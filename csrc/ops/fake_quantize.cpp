// SPDX-License-Identifier: Apache-2.0
#include "ops/fake_quantize.hpp"

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"
#include "ops/quantize.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

// The spec of a float weight to be coded.
WeightSpec coded_spec(std::string_view op, const TensorView& weight, int64_t format, int64_t group_size,
                      bool asymmetric) {
  check_activation(op, "weight", weight);
  check(weight.rank == 2, value, op, ": weight must have shape [n, k], got ", shape_text(weight));
  check_contiguous(op, "weight", weight);
  const WeightSpec spec = weight_spec(op, weight.size(0), weight.size(1), format, group_size, asymmetric);
  check(!is_float(spec.format), value, op, ": format must have codes, got ", kFormatNames[format]);
  check(!is_semi_sparse(spec.format), value, op, ": format must not be 2:4, got ", kFormatNames[format],
        ": training would change which weights are 0");
  return spec;
}

}  // namespace

FakeQuantizeArgs fake_quantize_args(const TensorView& weight, int64_t format, int64_t group_size, int64_t mapping_,
                                    const TensorView& scale, const TensorView& zero) {
  const Place place = place_of("fake_quantize", {{"weight", weight}, {"scale", scale}, {"zero", zero}});
  const auto mapping =
      static_cast<Mapping>(check_number("fake_quantize", "mapping", mapping_, std::size(kMappingNames)));
  const bool asymmetric = mapping == Mapping::asymmetric;
  const WeightSpec spec = coded_spec("fake_quantize", weight, format, group_size, asymmetric);
  if (scale) check_tensor("fake_quantize", "scale", scale, DType::float32, {spec.n, spec.groups()});
  check(bool(zero) == (bool(scale) && asymmetric), value,
        "fake_quantize: zero must be given if scale is given and mapping is asymmetric, and otherwise None, got ",
        zero ? "a tensor" : "None", " with mapping ", kMappingNames[mapping_]);
  if (zero) check_tensor("fake_quantize", "zero", zero, DType::float32, {spec.n, spec.groups()});
  return {.place = place, .spec = spec, .mapping = mapping, .weight = weight, .given_scale = scale,
          .given_zero = zero};
}

FakeQuantizeBackwardArgs fake_quantize_backward_args(const TensorView& grad, const TensorView& weight,
                                                     const TensorView& scale, const TensorView& zero, int64_t format,
                                                     int64_t group_size) {
  constexpr std::string_view op = "fake_quantize_backward";
  const Place place = place_of(op, {{"grad", grad}, {"weight", weight}, {"scale", scale}, {"zero", zero}});
  const WeightSpec spec = coded_spec(op, weight, format, group_size, false);  // zero points are separate tensors
  check_tensor(op, "grad", grad, weight.dtype, {spec.n, spec.k});
  check_tensor(op, "scale", scale, DType::float32, {spec.n, spec.groups()});
  check_tensor(op, "zero", zero, DType::float32, {spec.n, spec.groups()});
  return {.place = place, .spec = spec, .grad = grad, .weight = weight, .scale = scale, .zero = zero};
}

FakeQuantizeActivationsArgs fake_quantize_activations_args(const TensorView& x, int64_t x_format_,
                                                           int64_t group_size) {
  constexpr std::string_view op = "fake_quantize_activations";
  const Place place = place_of(op, {{"x", x}});
  check_activation(op, "x", x);
  check(x.rank >= 1 && x.size(-1) >= 1, value, op, ": x must have shape [..., k], got ", shape_text(x));
  check_contiguous(op, "x", x);
  const auto x_format = static_cast<XFormat>(check_number(op, "x_format", x_format_, std::size(kXFormatNames)));
  check(x_format != XFormat::floating, value, op, ": x_format must be one that rounds, got float");
  check(group_size >= 0 && group_size % 16 == 0, value, op, ": group_size must be a multiple of 16 or 0, got ",
        group_size);
  return {.place = place, .x_format = x_format, .group_size = group_size, .x = x};
}

Call describe(const FakeQuantizeArgs& args) {
  return Call{.read = bytes_of(args.weight) + bytes_of(args.given_scale) + bytes_of(args.given_zero),
              .written = bytes_of(args.out) + bytes_of(args.scale) + bytes_of(args.zero)}
      .with(args.weight, args.out);
}

Call describe(const FakeQuantizeBackwardArgs& args) {
  return Call{.read = bytes_of(args.grad) + bytes_of(args.weight) + bytes_of(args.scale) + bytes_of(args.zero),
              .written = bytes_of(args.grad) + bytes_of(args.grad_scale)}
      .with(args.grad, args.weight);
}

Call describe(const FakeQuantizeActivationsArgs& args) {
  return Call{.read = bytes_of(args.x), .written = bytes_of(args.out)}.with(args.x, args.out);
}

}  // namespace lowbit
