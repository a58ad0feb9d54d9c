// SPDX-License-Identifier: Apache-2.0
// The steps of a program that recurrent layers have: gated delta nets, Mamba-1 and 2, short convolutions. Their inputs are
// columns of what one product made, and their states, in the cache of a model, are written in place.
#pragma once

#include "ops/causal_conv1d.hpp"
#include "ops/gated_delta_rule.hpp"
#include "ops/gated_rms_norm.hpp"
#include "ops/pointwise.hpp"
#include "ops/program_operand.hpp"
#include "ops/selective_scan.hpp"
#include "ops/ssd.hpp"

namespace lowbit {

struct MaskRowsStep {          // multiplies the rows of x [B, T, n], a result, in place, if there is a mask
  Operand x, mask;             // mask [B, T, 1], dtype of x, or [0]: nothing is done
};
struct ScaleColumnsStep {      // multiplies the columns of x [.., n], a result, in place
  Operand x, factors;          // factors [n], float32
};
struct CausalConv1dStep {      // the result is [B, T, D]
  Operand x, weight, state, bias;  // the D columns of x [B, T, n] from `column` on; state [B, D, S]
  int64_t column = 0;
  bool silu = false;
};
struct GatedDeltaRuleStep {    // the result is [B, T, Hv Dv]
  Operand qkv, g, beta, state; // q, k, v side by side [B, T, n]; Hv columns of beta [B, T, n], and of g, Hv Dk if
                               // per_channel
  Operand a_log, dt_bias;
  int64_t key_heads = 0, dk = 0, heads = 0, dv = 0;
  int64_t g_column = 0, beta_column = 0;
  bool l2norm = false, per_channel = false;
  double scale = 1, beta_scale = 1;
};
struct SsdStep {               // the result is [B, T, H P]
  Operand xbc, dt, a, state;   // x, B, C side by side [B, T, n]; H columns of dt [B, T, n]
  Operand d, dt_bias;
  int64_t heads = 0, p = 0, groups = 0, s = 0;
  int64_t dt_column = 0;
  bool softplus = false;
  double dt_min = 0, dt_max = 0;
};
struct SelectiveScanStep {     // the result is [B, T, D]
  Operand x, dt, a, state;     // x, dt [B, T, D]
  Operand b, c, d, dt_bias, z; // S columns of B and of C, D columns of z, each [B, T, n]
  int64_t s = 0;
  int64_t b_column = 0, c_column = 0, z_column = 0;
  bool softplus = false;
  double dt_min = 0, dt_max = 0;
};
struct GatedRmsNormStep {      // the result has the shape of x
  Operand x, gate, weight;     // x [B, T, h n] with weight [n]; h n columns of gate [B, T, m]
  int64_t gate_column = 0, group_size = 0;
  double eps = 0;
  bool sigmoid = false, gate_first = false;
};

// The checked arguments of a step, given what its operands are. Results have no address.
PointwiseArgs step_args(const MaskRowsStep& step, const TensorView& x, const TensorView& mask);
PointwiseArgs step_args(const ScaleColumnsStep& step, const TensorView& x, const TensorView& factors);
CausalConv1dArgs step_args(const CausalConv1dStep& step, const TensorView& x, const TensorView& weight,
                           const TensorView& state, const TensorView& bias);
GatedDeltaRuleArgs step_args(const GatedDeltaRuleStep& step, const TensorView& qkv, const TensorView& g,
                             const TensorView& beta, const TensorView& state, const TensorView& a_log,
                             const TensorView& dt_bias);
SsdArgs step_args(const SsdStep& step, const TensorView& xbc, const TensorView& dt, const TensorView& a,
                  const TensorView& state, const TensorView& d, const TensorView& dt_bias);
SelectiveScanArgs step_args(const SelectiveScanStep& step, const TensorView& x, const TensorView& dt,
                            const TensorView& a, const TensorView& b, const TensorView& c, const TensorView& state,
                            const TensorView& d, const TensorView& dt_bias, const TensorView& z);
GatedRmsNormArgs step_args(const GatedRmsNormStep& step, const TensorView& x, const TensorView& gate,
                           const TensorView& weight);

}  // namespace lowbit
