// SPDX-License-Identifier: Apache-2.0
#include "ops/program_recurrent.hpp"

#include <algorithm>

#include "ops/checks.hpp"
#include "ops/place.hpp"
#include "ops/program_views.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

// [B, T, heads, size], contiguous and without an address.
TensorView result_like(const TensorView& x, int64_t heads, int64_t size) {
  return shaped({.dtype = x.dtype, .device = x.device}, {x.size(0), x.size(1), heads, size});
}

// A state that a step goes on from and writes.
void check_written(std::string_view op, const TensorView& state) { check_contiguous(op, "state", state); }

}  // namespace

PointwiseArgs step_args(const MaskRowsStep&, const TensorView& x, const TensorView& mask) {
  PointwiseArgs args = pointwise_args(x, 0, 1, {}, 0, 0, 0, mask, "mask_rows");
  args.gate_function = GateFunction::identity;
  args.y = x;
  return args;
}

PointwiseArgs step_args(const ScaleColumnsStep&, const TensorView& x, const TensorView& factors) {
  constexpr std::string_view op = "scale_columns";
  check(x.rank >= 1 && x.size(-1) > 1 && factors.rank == 1 && factors.size(0) == x.size(-1), value, op,
        ": factors must have a number for each of the columns of x, two or more, got ", shape_text(factors), " for ",
        shape_text(x));
  check_dtype(op, "factors", factors, DType::float32);
  check_contiguous(op, "factors", factors);
  PointwiseArgs args = pointwise_args(x, 0, 1, {}, 0, 0, 0, {}, op);
  place_of(op, {{"x", x}, {"factors", factors}});
  args.gate = x;
  args.gate.dtype = factors.dtype, args.gate.data = factors.data;
  std::fill_n(args.gate.stride.begin(), x.rank - 1, 0);
  args.gate_function = GateFunction::identity;
  args.y = x;
  return args;
}

CausalConv1dArgs step_args(const CausalConv1dStep& step, const TensorView& x, const TensorView& weight,
                           const TensorView& state, const TensorView& bias) {
  constexpr std::string_view op = "causal_conv1d";
  check(weight.rank == 2, value, op, ": weight must have shape [D, K], got ", shape_text(weight));
  check_written(op, state);
  CausalConv1dArgs args = causal_conv1d_args({.x = columns_of(op, "x", x, step.column, weight.size(0)),
                                              .weight = weight, .bias = bias, .state = state, .silu = step.silu});
  args.y = without_heads(result_like(args.x, 1, weight.size(0)));
  args.final_state = state;
  return args;
}

GatedDeltaRuleArgs step_args(const GatedDeltaRuleStep& step, const TensorView& qkv, const TensorView& g,
                             const TensorView& beta, const TensorView& state, const TensorView& a_log,
                             const TensorView& dt_bias) {
  constexpr std::string_view op = "gated_delta_rule";
  const int64_t keys = step.key_heads * step.dk;
  check_written(op, state);
  GatedDeltaRuleArgs args =
      gated_delta_rule_args({.q = heads_of(op, "qkv", qkv, 0, step.key_heads, step.dk),
                             .k = heads_of(op, "qkv", qkv, keys, step.key_heads, step.dk),
                             .v = heads_of(op, "qkv", qkv, 2 * keys, step.heads, step.dv),
                             .g = step.per_channel ? heads_of(op, "g", g, step.g_column, step.heads, step.dk)
                                                   : columns_of(op, "g", g, step.g_column, step.heads),
                             .beta = columns_of(op, "beta", beta, step.beta_column, step.heads),
                             .a_log = a_log, .dt_bias = dt_bias, .beta_scale = step.beta_scale, .state = state,
                             .l2norm = step.l2norm, .scale = step.scale});
  args.o = result_like(qkv, step.heads, step.dv);
  args.final_state = state;
  return args;
}

SsdArgs step_args(const SsdStep& step, const TensorView& xbc, const TensorView& dt, const TensorView& a,
                  const TensorView& state, const TensorView& d, const TensorView& dt_bias) {
  constexpr std::string_view op = "ssd";
  const int64_t inner = step.heads * step.p, of_groups = step.groups * step.s;
  check_written(op, state);
  SsdArgs args = ssd_args({.x = heads_of(op, "xBC", xbc, 0, step.heads, step.p),
                           .dt = columns_of(op, "dt", dt, step.dt_column, step.heads),
                           .a = a,
                           .b = heads_of(op, "xBC", xbc, inner, step.groups, step.s),
                           .c = heads_of(op, "xBC", xbc, inner + of_groups, step.groups, step.s),
                           .d = d, .dt_bias = dt_bias, .state = state, .softplus = step.softplus,
                           .dt_min = step.dt_min, .dt_max = step.dt_max});
  args.y = result_like(xbc, step.heads, step.p);
  args.final_state = state;
  return args;
}

SelectiveScanArgs step_args(const SelectiveScanStep& step, const TensorView& x, const TensorView& dt,
                            const TensorView& a, const TensorView& b, const TensorView& c, const TensorView& state,
                            const TensorView& d, const TensorView& dt_bias, const TensorView& z) {
  constexpr std::string_view op = "selective_scan";
  check(x.rank == 3, value, op, ": x must have shape [B, T, D], got ", shape_text(x));
  check_written(op, state);
  const int64_t channels = x.size(2);
  SelectiveScanArgs args = selective_scan_args(
      {.x = x, .dt = dt, .a = a, .b = heads_of(op, "B", b, step.b_column, 1, step.s),
       .c = heads_of(op, "C", c, step.c_column, 1, step.s), .d = d, .dt_bias = dt_bias,
       .z = step.z ? columns_of(op, "z", z, step.z_column, channels) : TensorView{}, .state = state,
       .softplus = step.softplus, .dt_min = step.dt_min, .dt_max = step.dt_max});
  args.y = without_heads(result_like(x, 1, channels));
  args.final_state = state;
  return args;
}

GatedRmsNormArgs step_args(const GatedRmsNormStep& step, const TensorView& x, const TensorView& gate,
                           const TensorView& weight) {
  constexpr std::string_view op = "gated_rms_norm";
  const int64_t n = weight.rank == 1 ? weight.size(0) : 0, columns = x.rank == 3 ? x.size(2) : 0;
  check(n > 0 && columns % n == 0, value, op, ": x must have shape [B, T, h n] with weight [n], got ", shape_text(x),
        " and ", shape_text(weight));
  GatedRmsNormArgs args =
      gated_rms_norm_args({.x = heads_of(op, "x", x, 0, columns / n, n),
                           .gate = heads_of(op, "gate", gate, step.gate_column, columns / n, n),
                           .weight = weight, .eps = step.eps, .group_size = step.group_size, .sigmoid = step.sigmoid,
                           .gate_first = step.gate_first});
  args.y = result_like(x, columns / n, n);
  return args;
}

}  // namespace lowbit
