// SPDX-License-Identifier: Apache-2.0
#include "ops/linear.hpp"

#include <string>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

WeightSpec weight_spec(std::string_view op, int64_t n, int64_t k, int64_t format, int64_t group_size, bool asymmetric) {
  check_number(op, "format", format, std::size(kFormatNames));
  check(n >= 1 && k >= 1, value, op, ": n and k must be at least 1, got n=", n, " k=", k);
  const bool sixteen = smallest_group(static_cast<Format>(format)) == 16;
  check(group_size == 0 || group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256 ||
            (sixteen && group_size == 16),
        value, op, ": group_size must be ", sixteen ? "16, " : "",
        "32, 64, 128, 256 or 0 (per channel), got group_size=", group_size);
  const WeightSpec spec{static_cast<Format>(format), n, k, group_size, asymmetric};
  check(!is_float(spec.format) || (group_size == 0 && !asymmetric), value, op,
        ": group_size must be 0 and asymmetric false for a ", kFormatNames[format],
        " weight, got group_size=", group_size, " asymmetric=", asymmetric);
  const bool has_zeros = kind_of(spec.format) != CodecKind::lookup && !is_semi_sparse(spec.format);
  check(has_zeros || !asymmetric, value, op, ": asymmetric must be false for a ", kFormatNames[format],
        " weight, which has no zero point, got asymmetric=", asymmetric);
  check(!is_semi_sparse(spec.format) || k % 4 == 0, value, op, ": k must be a multiple of 4 for a ",
        kFormatNames[format], " weight, of which two of each four are 0, got k=", k);
  return spec;
}

XFormat x_format(int64_t value_, const WeightSpec& spec) {
  const auto chosen = static_cast<XFormat>(check_number("linear", "x_format", value_, std::size(kXFormatNames)));
  if (!goes_with(chosen, spec.format)) {
    std::string wanted;
    for (std::size_t i = 0; i < std::size(kXFormatNames); i++)
      if (goes_with(static_cast<XFormat>(i), spec.format)) (wanted += i ? " or " : "") += kXFormatNames[i];
    check(false, value, "linear: x_format must be ", wanted, " for a ", kFormatNames[static_cast<int>(spec.format)],
          " weight, got ", kXFormatNames[value_]);
  }
  return chosen;
}

void check_weight(std::string_view op, const TensorView& weight, const WeightSpec& spec) {
  check(weight.dtype == DType::uint8, type, op, ": weight must be packed uint8, got ", name_of(weight.dtype));
  check(weight.rank == 2 && weight.size(0) == spec.panels() && weight.size(1) == spec.panel_bytes(), value, op,
        ": weight must have the packed shape [", spec.panels(), ", ", spec.panel_bytes(), "] of ",
        kFormatNames[static_cast<int>(spec.format)], " with n=", spec.n, " k=", spec.k, " group_size=", spec.group_size,
        " asymmetric=", spec.asymmetric, ", got ", shape_text(weight));
  check_contiguous(op, "weight", weight);
}

namespace {

void check_like_y(const TensorView& tensor, const TensorView& y, std::string_view name) {
  if (!tensor) return;
  check(tensor.dtype == y.dtype, type, "linear: ", name, " must have the dtype of x, got ", name_of(tensor.dtype),
        " and ", name_of(y.dtype));
  check(tensor.rank == y.rank && std::equal(y.shape.begin(), y.shape.begin() + y.rank, tensor.shape.begin()), value,
        "linear: ", name, " must have the shape of the result ", shape_text(y), ", got ", shape_text(tensor));
  check_contiguous("linear", name, tensor);
}

}  // namespace

LinearArgs linear_args(const LinearTensors& tensors, const WeightSpec& spec, int64_t x_format_, int64_t activation) {
  const auto& [x, weight, bias, mul, add, y] = tensors;
  const Place place = place_of(
      "linear", {{"x", x}, {"weight", weight}, {"bias", bias}, {"mul", mul}, {"add", add}, {"the result", y}});
  check_activation("linear", "x", x);
  // Padding hides a wrong k in the shape of the weight. A RuntimeError, as torch.nn.functional.linear raises.
  check(x.rank >= 1 && x.size(-1) == spec.k, runtime, "linear: the last dimension of x must be k=", spec.k,
        " (in_features), got x of shape ", shape_text(x));
  check_contiguous("linear", "x", x);
  check(y.rank == x.rank && y.size(-1) == spec.n && y.dtype == x.dtype && y.is_contiguous(), value,
        "linear: the result must be contiguous with last dimension n=", spec.n, " and the dtype of x, got ",
        shape_text(y));
  check_weight("linear", weight, spec);
  if (bias) check_activation("linear", "bias", bias);
  check(!bias || (bias.rank == 1 && bias.size(0) == spec.n && bias.is_contiguous()), value,
        "linear: bias must be a contiguous [n=", spec.n, "], got ", shape_text(bias));
  check_like_y(mul, y, "mul");
  check_like_y(add, y, "add");
  check_number("linear", "activation", activation, std::size(kActivationNames));
  return {.place = place,
          .m = x.numel() / spec.k,
          .weight_spec = spec,
          .x_format = x_format(x_format_, spec),
          .activation = static_cast<Activation>(activation),
          .dtype = x.dtype,
          .bias_dtype = bias ? bias.dtype : DType::float32,
          .x = x.data,
          .weight = weight.as<const uint8_t>(),
          .bias = bias.data,
          .mul = mul.data,
          .add = add.data,
          .y = y.data,
          .low_rank = {}};
}

void add_low_rank(LinearArgs& args, const TensorView& inner, const TensorView& up,
                  std::span<const LowRank::Part> parts) {
  const int64_t n = args.weight_spec.n, panels = args.weight_spec.panels();
  check_on(args.place, "linear", "inner", std::span(&inner, 1));
  check_on(args.place, "linear", "up", std::span(&up, 1));
  check(inner.dtype == args.dtype, type, "linear: inner must have the dtype of x, got ", name_of(inner.dtype), " and ",
        name_of(args.dtype));
  check(inner.rank >= 1 && inner.size(-1) > 0 && inner.numel() == args.m * inner.size(-1), value,
        "linear: inner must have the ", args.m, " rows of x, got ", shape_text(inner));
  check_contiguous("linear", "inner", inner);
  check_activation("linear", "up", up);
  check(up.rank == 3 && up.size(0) == panels && up.size(1) > 0 && up.size(2) == 16, value,
        "linear: up must have shape [", panels, ", rank, 16] for n=", n, ", got ", shape_text(up));
  check_contiguous("linear", "up", up);
  const int64_t width = inner.size(-1), rank = up.size(1);
  check(!parts.empty() && parts.size() <= LowRank::kParts && parts.back().end == n, value,
        "linear: the parts of an adapter must be 1 to ", LowRank::kParts, " and end with output ", n, ", got ",
        parts.size(), " that end with ", parts.empty() ? 0 : parts.back().end);
  LowRank low{.inner = inner.data, .up = up.data, .up_dtype = up.dtype, .width = width, .rank = rank, .parts = {}};
  int64_t begin = 0;
  for (std::size_t i = 0; i < parts.size(); begin = parts[i++].end) {
    const auto [end, column] = parts[i];
    check(end > begin && (end == n || end % 16 == 0), value,
          "linear: the parts of an adapter must rise by multiples of 16, got ", end, " behind ", begin);
    check(column >= -1 && column <= width - rank, value, "linear: a part of an adapter must read ", rank, " of the ",
          width, " columns of inner, or -1 for none, got the first as ", column);
    low.parts[i] = parts[i];
  }
  args.low_rank = low;
}

Call describe(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  const LowRank& low = args.low_rank;
  const int64_t m = args.m, element = static_cast<int64_t>(size_of(args.dtype)), result = m * spec.n * element;
  Call call{.arithmetic = stays_float(args.x_format) ? Arithmetic::floating : Arithmetic::integer,
            .read = m * spec.k * element + spec.panels() * spec.panel_bytes() +
                    (args.bias ? spec.n * static_cast<int64_t>(size_of(args.bias_dtype)) : 0) +
                    result * ((args.mul != nullptr) + (args.add != nullptr)) + m * low.width * element +
                    spec.panels() * 16 * low.rank * static_cast<int64_t>(size_of(low.up_dtype)),
            .written = result,
            .operations = 2 * m * spec.n * (spec.k + low.rank)};
  call.add(args.dtype, {m, spec.k});
  call.add(DType::uint8, {spec.panels(), spec.panel_bytes()});
  call.add(args.dtype, {m, spec.n});
  return call;
}

}  // namespace lowbit
