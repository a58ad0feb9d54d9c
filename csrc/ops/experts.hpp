// SPDX-License-Identifier: Apache-2.0
// experts: the feed-forward layer of a mixture of experts,
//   y[t] = sum over j of weights[t, j] * (act(gate_e(x[t]), up_e(x[t])) @ down_e.T + down_bias_e),  e = index[t, j]
// gate_e and up_e are the halves of x @ gate_up_e.T + gate_up_bias_e. A pair (t, j) with index E contributes nothing.
#pragma once

#include "core/tensor_view.hpp"
#include "formats/format.hpp"
#include "ops/kernel.hpp"
#include "ops/linear_formats.hpp"

namespace lowbit {

// act(gate, up) = f(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset), or f(gate) if experts have no gate.
// f is an activation of linear, or relu squared; silu is gate * sigmoid(alpha * gate).
enum class ExpertActivation : int { none, relu, gelu, gelu_tanh, silu, relu_squared };
inline constexpr std::string_view kExpertActivationNames[] = {"none", "relu", "gelu", "gelu_tanh", "silu",
                                                              "relu_squared"};

struct Gate {
  ExpertActivation activation = ExpertActivation::silu;
  bool gated = true;         // false: gate_up is the gate alone
  bool interleaved = false;  // columns gate, up, gate, up ..; false: all gates, then all ups
  float alpha = 1.0f, limit = 0.0f, up_offset = 0.0f;  // limit 0: none
};

// The packed weights of all experts, which have one shape.
struct ExpertWeights {
  WeightSpec spec;  // spec of one expert
  XFormat x_format = XFormat::floating;
  TensorView packed;  // [E, panels, panel_bytes] uint8, contiguous
  TensorView bias;    // [E, n] float32, bfloat16 or float16, contiguous; or none
};

struct ExpertsArgs {
  Place place{};
  TensorView x;  // [T, H] float32, bfloat16 or float16, contiguous
  ExpertWeights gate_up, down;  // [2 I, H], or [I, H] without a gate; [n, I]
  TensorView index;             // [T, k] int32 or int64, contiguous: 0 to E; the row checks it before it writes
  TensorView weights;           // [T, k] of the three dtypes, contiguous
  Gate gate;
  TensorView y{};  // [T, n], dtype of x, contiguous: written

  int64_t experts() const { return gate_up.packed.size(0); }
  int64_t tokens() const { return x.size(0); }
  int64_t each() const { return index.size(1); }
};

// Checks all arguments but y, except the numbers in `index`.
LOWBIT_API ExpertsArgs experts_args(const ExpertsArgs& given, int64_t gate_up_x_format, int64_t down_x_format,
                                    int64_t activation);
LOWBIT_API Call describe(const ExpertsArgs& args);

}  // namespace lowbit
