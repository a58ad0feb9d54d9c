// SPDX-License-Identifier: Apache-2.0
// C function of mixtures of experts.
#include "ops/experts.hpp"

#include "capi/call.hpp"
#include "core/error.hpp"
#include "ops/checks.hpp"

namespace lowbit::capi {

using enum ErrorKind;

static_assert(static_cast<int>(ExpertActivation::silu) == LOWBIT_ACTIVATION_SILU &&
              static_cast<int>(ExpertActivation::relu_squared) == LOWBIT_ACTIVATION_RELU_SQUARED);

namespace {

constexpr std::string_view kOp = "experts";

// The weights of all experts, one behind another. Their number follows from their bytes.
ExpertWeights expert_weights(std::string_view name, const lowbit_packed_weight* given, TensorView bias) {
  const PackedWeight one = described_weight(kOp, name, given);
  const int64_t bytes = one.packed.numel();
  check(given->bytes >= bytes && given->bytes % bytes == 0, value, kOp, ": ", name,
        " must have a multiple of the ", bytes, " bytes of one expert, got bytes=", given->bytes);
  check(given->data, value, kOp, ": ", name, " must have data, got NULL");
  check_kernel_layout(kOp, name, one.layout);
  TensorView packed{.data = given->data, .dtype = DType::uint8, .rank = 3};
  packed.shape = {given->bytes / bytes, one.sections.rows, one.sections.row_bytes};
  packed.stride = {bytes, one.sections.row_bytes, 1};
  return {.spec = one.spec, .packed = packed, .bias = bias};
}

}  // namespace

extern "C" int lowbit_experts(const lowbit_tensor* x, const lowbit_packed_weight* gate_up,
                              const lowbit_packed_weight* down, const lowbit_tensor* index,
                              const lowbit_tensor* weights, const lowbit_tensor* y,
                              const lowbit_experts_options* given) {
  return status_of([&] {
    const auto chosen = options(kOp, given);
    ExpertsArgs args{
        .x = tensor(kOp, "x", x),
        .gate_up = expert_weights("gate_up", gate_up, optional(kOp, "gate_up_bias", chosen.gate_up_bias)),
        .down = expert_weights("down", down, optional(kOp, "down_bias", chosen.down_bias)),
        .index = tensor(kOp, "index", index),
        .weights = tensor(kOp, "weights", weights),
        .gate = {.gated = chosen.no_gate == 0,
                 .interleaved = chosen.interleaved != 0,
                 .alpha = chosen.alpha == 0.0 ? 1.0f : static_cast<float>(chosen.alpha),
                 .limit = static_cast<float>(chosen.limit),
                 .up_offset = static_cast<float>(chosen.up_offset)}};
    args = experts_args(args, chosen.gate_up_x_format, chosen.down_x_format, chosen.activation);
    args.y = tensor(kOp, "y", y);
    check_tensor(kOp, "y", args.y, args.x.dtype, {args.tokens(), args.down.spec.n});
    if (args.tokens() > 0) run(args);
  });
}

}  // namespace lowbit::capi
