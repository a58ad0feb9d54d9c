// SPDX-License-Identifier: Apache-2.0
#include "ops/linear_cross_entropy.hpp"

#include <cmath>

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kLoss = "linear_cross_entropy";

Format format_of(DType dtype) {
  return dtype == DType::float32 ? Format::float32 : dtype == DType::bfloat16 ? Format::bfloat16 : Format::float16;
}

void check_head(const LinearCrossEntropyArgs& args) {
  const TensorView& head = args.head;
  const WeightSpec& spec = args.spec;
  check(head.dtype == DType::uint8 || is_activation(head.dtype), type, kLoss,
        ": head must be packed uint8, or float32, bfloat16 or float16, got ", name_of(head.dtype));
  if (args.packed()) {
    check_shape(kLoss, "head", head, {spec.panels(), spec.panel_bytes()});
  } else {
    check_shape(kLoss, "head", head, {spec.n, spec.k});
    check(spec.format == format_of(head.dtype), value, kLoss, ": format must be that of the dtype of a float head, here ",
          name_of(head.dtype), ", got ", kFormatNames[static_cast<int>(spec.format)]);
    check(args.x_format == XFormat::floating, value, kLoss, ": x_format must be float for a float head, got ",
          kXFormatNames[static_cast<int>(args.x_format)]);
  }
  check_contiguous(kLoss, "head", head);
}

void check_formula(const LinearCrossEntropyArgs& args) {
  check(std::isfinite(args.scale) && args.scale != 0, value, kLoss, ": scale must be finite and not 0, got ", args.scale);
  check(std::isfinite(args.softcap) && args.softcap >= 0, value, kLoss,
        ": softcap must be positive, or 0 for none, got ", args.softcap);
  check(args.smoothing >= 0 && args.smoothing <= 1, value, kLoss, ": label_smoothing must be 0 to 1, got ",
        args.smoothing);
  check(std::isfinite(args.z_loss) && args.z_loss >= 0, value, kLoss, ": z_loss must be finite and not negative, got ",
        args.z_loss);
}

void check_gradients(const LinearCrossEntropyArgs& args) {
  check(args.row_weight || !(args.of_x || args.of_head || args.of_bias), value, kLoss,
        ": row_weight must be given where a gradient is wanted");
  check(!args.of_head || !args.packed(), value, kLoss, ": a packed head has no gradient, got grad_head=true");
  check(!args.of_bias || args.bias, value, kLoss, ": bias must be given where its gradient is wanted");
}

}  // namespace

LinearCrossEntropyArgs linear_cross_entropy_args(const LinearCrossEntropyArgs& given, int64_t x_format_) {
  LinearCrossEntropyArgs args = given;
  const TensorView &x = args.x, &labels = args.labels, &bias = args.bias, &row_weight = args.row_weight;
  args.place = place_of(kLoss, {{"x", x}, {"head", args.head}, {"labels", labels}, {"bias", bias},
                              {"row_weight", row_weight}});
  args.x_format = x_format(x_format_, args.spec);
  check_activation(kLoss, "x", x);
  check(x.rank == 2 && x.size(1) == args.spec.k, value, kLoss, ": x must have shape [T, k] with k=", args.spec.k,
        " of the head, got ", shape_text(x));
  check_contiguous(kLoss, "x", x);
  check(x.size(0) <= INT32_MAX, value, kLoss, ": x must have fewer than 2^31 rows, got ", x.size(0));
  check_head(args);
  check_tensor(kLoss, "labels", labels, DType::int64, {x.size(0)});
  if (bias) {
    check_activation(kLoss, "bias", bias);
    check_tensor(kLoss, "bias", bias, bias.dtype, {args.spec.n});
  }
  if (row_weight) check_tensor(kLoss, "row_weight", row_weight, DType::float32, {x.size(0)});
  check_formula(args);
  check_gradients(args);
  return args;
}

// A product for the logits and one for the gradient of x; that of the head computes the logits again.
Call describe(const LinearCrossEntropyArgs& args) {
  const int64_t products = 1 + args.of_x + (args.of_head ? 2 : args.of_bias);
  return Call{.arithmetic = stays_float(args.x_format) ? Arithmetic::floating : Arithmetic::integer,
              .read = bytes_of(args.x) + bytes_of(args.head) + bytes_of(args.labels) + bytes_of(args.bias) +
                      bytes_of(args.row_weight),
              .written = bytes_of(args.loss) + bytes_of(args.lse) + bytes_of(args.grad_x) + bytes_of(args.grad_head) +
                         bytes_of(args.grad_bias),
              .operations = 2 * products * args.rows() * args.spec.n * args.spec.k}
      .with(args.x, args.head, args.loss);
}

}  // namespace lowbit
