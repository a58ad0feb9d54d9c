// SPDX-License-Identifier: Apache-2.0
#include "ops/experts.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

#include "ops/checks.hpp"
#include "ops/linear.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

constexpr std::string_view kOp = "experts";

void check_weights(std::string_view name, const ExpertWeights& weights, int64_t experts) {
  const auto& [spec, x_format, packed, bias] = weights;
  check(packed.dtype == DType::uint8, type, kOp, ": ", name, " must be packed uint8, got ", name_of(packed.dtype));
  check(packed.rank == 3 && packed.size(0) >= 1, value, kOp, ": ", name,
        " must have shape [E, panels, panel_bytes], E at least 1, got ", shape_text(packed));
  check_shape(kOp, name, packed, {experts, spec.panels(), spec.panel_bytes()});
  check_contiguous(kOp, name, packed);
  if (!bias) return;
  const std::string bias_name = concat(name, "_bias");
  check_activation(kOp, bias_name, bias);
  check_tensor(kOp, bias_name, bias, bias.dtype, {experts, spec.n});
}

void check_gate(const Gate& gate) {
  const bool silu = gate.activation == ExpertActivation::silu;
  check(std::isfinite(gate.alpha) && (silu || gate.alpha == 1.0f), value, kOp,
        ": alpha must be finite, and 1 for an activation other than silu, got ", gate.alpha);
  check(gate.limit >= 0.0f, value, kOp, ": limit must be positive, or 0 for none, got ", gate.limit);
  check(std::isfinite(gate.up_offset), value, kOp, ": up_offset must be finite, got ", gate.up_offset);
  check(gate.gated || !(gate.interleaved || gate.limit != 0.0f || gate.up_offset != 0.0f), value, kOp,
        ": interleaved, limit and up_offset must be left out for experts without a gate (gated=False)");
}

}  // namespace

ExpertsArgs experts_args(const ExpertsArgs& given, int64_t gate_up_x_format, int64_t down_x_format,
                         int64_t activation) {
  ExpertsArgs args = given;
  auto& [place, x, gate_up, down, index, weights, gate, y] = args;
  place = place_of(kOp, {{"x", x}, {"gate_up", gate_up.packed}, {"down", down.packed}, {"index", index},
                         {"weights", weights}, {"gate_up_bias", gate_up.bias}, {"down_bias", down.bias}});
  gate.activation =
      static_cast<ExpertActivation>(check_number(kOp, "activation", activation, std::size(kExpertActivationNames)));
  check_gate(gate);
  gate_up.x_format = x_format(gate_up_x_format, gate_up.spec);
  down.x_format = x_format(down_x_format, down.spec);
  check_activation(kOp, "x", x);
  check(x.rank == 2 && x.size(1) == gate_up.spec.k, value, kOp, ": x must have shape [T, k] with k=", gate_up.spec.k,
        " of gate_up, got ", shape_text(x));
  check_contiguous(kOp, "x", x);
  check(gate_up.spec.n == down.spec.k * (gate.gated ? 2 : 1), value, kOp, ": n of gate_up must be ",
        gate.gated ? "twice the k of down" : "the k of down, as there is no gate", ", got ", gate_up.spec.n, " and ",
        down.spec.k);
  check_weights("gate_up", gate_up, gate_up.packed.rank == 3 ? gate_up.packed.size(0) : 0);
  check_weights("down", down, args.experts());
  check(index.dtype == DType::int32 || index.dtype == DType::int64, type, kOp, ": index must be int32 or int64, got ",
        name_of(index.dtype));
  check(index.rank == 2 && index.size(0) == x.size(0), value, kOp, ": index must have shape [T, k], here T=",
        x.size(0), ", got ", shape_text(index));
  check_contiguous(kOp, "index", index);
  check(index.numel() <= INT32_MAX, value, kOp, ": index must have fewer than 2^31 elements, got ", index.numel());
  check_activation(kOp, "weights", weights);
  check_tensor(kOp, "weights", weights, weights.dtype, {index.size(0), index.size(1)});
  return args;
}

// Each pair may have its own expert: min(number of pairs, E) weights.
Call describe(const ExpertsArgs& args) {
  const int64_t pairs = args.index.numel(), hit = std::min(pairs, args.experts());
  Call call{.arithmetic = stays_float(args.gate_up.x_format) ? Arithmetic::floating : Arithmetic::integer,
            .read = bytes_of(args.x) + bytes_of(args.index) + bytes_of(args.weights),
            .written = bytes_of(args.y)};
  for (const ExpertWeights* weights : {&args.gate_up, &args.down}) {
    const WeightSpec& spec = weights->spec;
    call.read += hit * spec.panels() * spec.panel_bytes() + bytes_of(weights->bias);
    call.operations += 2 * pairs * spec.n * spec.k;
  }
  return std::move(call).with(args.x, args.gate_up.packed, args.y);
}

}  // namespace lowbit
