// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta_rule.hpp"

#include <cmath>

#include "ops/checks.hpp"
#include "ops/place.hpp"

namespace lowbit {

using enum ErrorKind;

namespace {

GatedDeltaRuleArgs checked(std::string_view op, const GatedDeltaRuleArgs& given) {
  GatedDeltaRuleArgs args = given;
  const TensorView &q = args.q, &v = args.v, &ends = args.cu_seqlens;
  args.place = place_of(op, {{"q", q}, {"k", args.k}, {"v", v}, {"g", args.g}, {"beta", args.beta},
                              {"A_log", args.a_log}, {"dt_bias", args.dt_bias}, {"state", args.state},
                              {"cu_seqlens", ends}});
  check(q.rank == 4 && q.size(2) >= 1 && q.size(3) >= 1, value, op,
        ": q must have shape [B, T, Hk, Dk], Hk and Dk at least 1, got ", shape_text(q));
  check(v.rank == 4 && v.size(2) >= 1 && v.size(3) >= 1, value, op,
        ": v must have shape [B, T, Hv, Dv], Hv and Dv at least 1, got ", shape_text(v));
  const int64_t batch = args.batch(), tokens = args.tokens(), heads = args.heads(), dk = args.dk();
  check_tokens(op, "q", q, {batch, tokens, args.key_heads(), dk});
  check_tokens(op, "k", args.k, {batch, tokens, args.key_heads(), dk});
  check_tokens(op, "v", v, {batch, tokens, heads, args.dv()});
  check_dtype(op, "k", args.k, q.dtype);
  check_dtype(op, "v", v, q.dtype);
  check(heads % args.key_heads() == 0, value, op, ": the heads of v must be a multiple of the ", args.key_heads(),
        " heads of q and k, got ", heads);
  if (args.per_channel()) check_tokens(op, "g", args.g, {batch, tokens, heads, dk});
  else check_tokens(op, "g", args.g, {batch, tokens, heads});
  check_tokens(op, "beta", args.beta, {batch, tokens, heads});
  if (args.a_log) {
    check(std::isfinite(args.beta_scale), value, op, ": beta_scale must be finite, got ", args.beta_scale);
    check_numbers(op, "A_log", args.a_log, heads);
    check_numbers(op, "dt_bias", args.dt_bias, args.per_channel() ? heads * dk : heads);
  }
  check_cu_seqlens(op, ends, "q", q, "[1, T, Hk, Dk]");
  if (args.state)
    check_state(op, args.state, {args.sequences(), heads, dk, args.dv()});
  check(std::isfinite(args.scale), value, op, ": scale must be finite, got ", args.scale);
  return args;
}

int64_t bytes_of_inputs(const GatedDeltaRuleArgs& args) {
  return bytes_of(args.q) + bytes_of(args.k) + bytes_of(args.v) + bytes_of(args.g) + bytes_of(args.beta) +
         bytes_of(args.state);
}

}  // namespace

GatedDeltaRuleArgs gated_delta_rule_args(const GatedDeltaRuleArgs& given) { return checked("gated_delta_rule", given); }

GatedDeltaRuleBackwardArgs gated_delta_rule_backward_args(const GatedDeltaRuleBackwardArgs& given) {
  constexpr std::string_view op = "gated_delta_rule_backward";
  GatedDeltaRuleBackwardArgs args = given;
  args.forward = checked(op, given.forward);
  const TensorView &v = args.forward.v, &of_state = args.grad_final_state;
  args.place = place_of(op, {{"q", args.forward.q}, {"grad_o", args.grad_o}, {"grad_final_state", of_state}});
  check_dtype(op, "grad_o", args.grad_o, v.dtype);
  check_tokens(op, "grad_o", args.grad_o, {v.size(0), v.size(1), v.size(2), v.size(3)});
  if (of_state)
    check_tensor(op, "grad_final_state", of_state, args.forward.state_dtype(),
                 {args.forward.sequences(), v.size(2), args.forward.dk(), v.size(3)});
  return args;
}

// Three products with the state a token.
Call describe(const GatedDeltaRuleArgs& args) {
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(args),
              .written = bytes_of(args.o) + bytes_of(args.final_state),
              .operations = 6 * args.v.numel() * args.dk()}
      .with(args.q, args.v, args.final_state);
}

// Ten products of the size of a state per token: four compute states again, four are with a state or its gradient, two
// step the gradient back.
Call describe(const GatedDeltaRuleBackwardArgs& args) {
  const GatedDeltaRuleArgs& forward = args.forward;
  return Call{.arithmetic = Arithmetic::floating,
              .read = bytes_of_inputs(forward) + bytes_of(args.grad_o) + bytes_of(args.grad_final_state),
              .written = bytes_of(args.grad_q) + bytes_of(args.grad_k) + bytes_of(args.grad_v) + bytes_of(args.grad_g) +
                         bytes_of(args.grad_beta) + bytes_of(args.grad_state),
              .operations = 20 * forward.v.numel() * forward.dk()}
      .with(forward.q, forward.v, args.grad_o);
}

}  // namespace lowbit
