// SPDX-License-Identifier: Apache-2.0
// gated_delta_rule (Yang et al., 2412.06464; with a decay per channel: Kimi Delta Attention, 2510.26692): linear
// attention with a state S [Dk, Dv] per head, which forgets, and in which a token corrects what its key reads.
//   S = exp(g_t) S                     the decay: of the whole head, or of each of the Dk rows
//   S = S + k_t (beta_t (v_t - S^T k_t))^T
//   o_t = scale S^T q_t
// In float32, o and the final state rounded once. l2norm: q and k are divided by sqrt(sum of squares + 1e-6) first. With
// A_log, g and beta are what a layer projects, and the row makes of them
//   g = -exp(A_log) softplus(g + dt_bias);   beta = beta_scale sigmoid(beta)
#pragma once

#include "core/tensor_view.hpp"
#include "ops/kernel.hpp"

namespace lowbit {

inline constexpr float kL2NormEpsilon = 1e-6f;  // transformers' and FLA's

struct GatedDeltaRuleArgs {
  Place place{};
  TensorView q{}, k{};        // [B, T, Hk, Dk] float32, bfloat16 or float16, dense rows, any other strides
  TensorView v{};             // [B, T, Hv, Dv], dtype of q, likewise; Hv a multiple of Hk
  TensorView g{};             // [B, T, Hv] or [B, T, Hv, Dk], any of the three dtypes, dense rows; finite and at most 0
  TensorView beta{};          // [B, T, Hv], any of the three dtypes, dense rows
  TensorView a_log{};         // [Hv], any of the three dtypes, contiguous and finite; or none. With it g is finite, of any
                              // sign
  TensorView dt_bias{};       // [Hv], or with a decay per channel [Hv Dk], likewise; or none: zeros
  double beta_scale = 1;      // of projected beta; 2 gives the state negative eigenvalues (OLMo-hybrid)
  TensorView state{};         // [N, Hv, Dk, Dv] float32 or bfloat16, contiguous; or none: zeros
  TensorView cu_seqlens{};    // [N + 1] int32 or int64, contiguous: sequence n is tokens cu_seqlens[n] to
                              // cu_seqlens[n + 1] - 1, and B is 1; or none: N = B sequences of T tokens
  bool l2norm = false;
  double scale = 1;
  TensorView o{};             // [B, T, Hv, Dv], dtype of v, contiguous: written
  TensorView final_state{};   // [N, Hv, Dk, Dv], state_dtype(), contiguous: written; may be the memory of `state`

  int64_t batch() const { return q.size(0); }
  int64_t tokens() const { return q.size(1); }
  int64_t key_heads() const { return q.size(2); }
  int64_t dk() const { return q.size(3); }
  int64_t heads() const { return v.size(2); }
  int64_t dv() const { return v.size(3); }
  DType state_dtype() const { return state ? state.dtype : DType::float32; }
  int64_t sequences() const { return cu_seqlens ? cu_seqlens.size(0) - 1 : batch(); }
  bool per_channel() const { return g.rank == 4; }
};

// Checks all arguments but the results. The row checks the values of g and cu_seqlens before it writes anything.
LOWBIT_API GatedDeltaRuleArgs gated_delta_rule_args(const GatedDeltaRuleArgs& given);
LOWBIT_API Call describe(const GatedDeltaRuleArgs& args);

struct GatedDeltaRuleBackwardArgs {
  Place place{};
  GatedDeltaRuleArgs forward{};    // without its results
  TensorView grad_o{};             // shape and dtype of v, dense rows, any other strides
  TensorView grad_final_state{};   // [N, Hv, Dk, Dv], dtype of the final state, contiguous; or none: zeros
  // Written, contiguous: shapes and dtypes of the inputs, and [N, Hv, Dk, Dv] in that of the final state, which may be
  // the memory of grad_final_state.
  TensorView grad_q{}, grad_k{}, grad_v{}, grad_g{}, grad_beta{}, grad_state{};
};

// Checks all arguments but the gradients of the inputs.
LOWBIT_API GatedDeltaRuleBackwardArgs gated_delta_rule_backward_args(const GatedDeltaRuleBackwardArgs& given);
LOWBIT_API Call describe(const GatedDeltaRuleBackwardArgs& args);

}  // namespace lowbit
