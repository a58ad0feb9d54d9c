// SPDX-License-Identifier: Apache-2.0
// The integers of a program (program.hpp), as python/lowbit/ops/program.py writes them. Saved .pt2 files contain them:
// the meaning of a number never changes, and a new field of a step comes last and has a default.
//
//   kind         fields; "= ..." is the default of an optional one
//   score        the integers of a score program
//   columns      x, columns
//   rms_norm     x, weight, eps, offset, add = none
//   linear       x, weight, n, k, format, group_size, asymmetric, x_format, bias = none, activation = 0, mul = none,
//                add = none, row = 0, into = none, first_column = 0, inner = none, up = none, parts = 0, then the end and
//                the column of each part (LowRank)
//   rope_append  qkv, cos or none, sin or none, keys, values, start, q_weight = none, k_weight = none, eps = 0,
//                offset = 0, rotation = 0, grouped = 0, norm_behind = 0, gated = 0; without cos and sin nothing is rotated
//   attention    q, keys, values, start, scale, mask = none, causal = 0, score = none, sink = none,
//                cu_seqlens = none
//   route        x, k, scoring, weight = none, bias = none, rounds = 0, correction = none, groups = 1, groups_kept = 1,
//                group_top = 1, zero_outside = 0, normalize = 0, eps = 0, least = 0, scale = 1, expert_scale = none;
//                two results, the weights and then the index; without a weight, x are the logits
//   experts      x, gate_up, down, index, weights, n, k, format, group_size, asymmetric, x_format of gate_up, the same
//                of down, activation, gated, interleaved, alpha, limit, up_offset, gate_up_bias = none, down_bias = none
//   scaled_add   x, add = none, gate = none, scale = 1, gate_size = 0, gate_column = 0, gate_step = 0,
//                gate_function = 0, result = 0
//   layer_norm   x, weight or none, bias or none, eps, offset = 0, add = none
//   pointwise    x, function = 0, scale = 1, add = none, positive = 0, negative = 0, linear = 0
//   self_attention  qkv, kv_heads, e, scale, mask = none, cu_seqlens = none
//   cross_attention  q, keys, values, scale, mask = none
//   mask_rows    x, mask; no result
//   scale_columns     x, factors; no result
//   causal_conv1d     x, weight, state, bias = none, column = 0, silu = 0
//   gated_delta_rule  qkv, g, beta, state, key_heads, dk, heads, dv, scale, l2norm = 0, A_log = none, dt_bias = none,
//                     g_column = 0, beta_column = 0, beta_scale = 1, per_channel = 0
//   ssd               xBC, dt, A, state, heads, p, groups, s, dt_min, dt_max, D = none, dt_bias = none, softplus = 0,
//                     dt_column = 0
//   selective_scan    x, dt, A, B, C, state, s, dt_min, dt_max, D = none, dt_bias = none, z = none, softplus = 0,
//                     b_column = 0, c_column = 0, z_column = 0
//   gated_rms_norm    x, gate, weight, eps, group_size, sigmoid = 0, gate_first = 0, gate_column = 0
//   heads        x, heads, size, column, step, into = none, into_column = 0, start = -1, cos = none, sin = none,
//                rotation = 0, weight = none, eps = 0, offset = 0; a result unless there is an into; start if and only
//                if that is a state
//   head_linear  x, weight, n, k, format, group_size, asymmetric, x_format
//
// A result of scaled_add is 0 for the dtype of x, 1 for float32, 2 for bfloat16, 3 for float16.
//
// An operand is 4 * index + 0 for a constant, 1 for a state, 2 for an input, 3 for a result; -1 is none. A real number
// is stored as the integer with its bits.
#pragma once

#include <cstdint>
#include <string_view>

namespace lowbit {

inline constexpr std::string_view kRunProgram = "run_program";
inline constexpr int64_t kProgramVersion = 1;

enum class StepKind : int64_t {
  score = 1, columns = 2, rms_norm = 3, linear = 4, rope_append = 5, attention = 6, route = 7, experts = 8,
  scaled_add = 9,
  layer_norm = 16, pointwise = 17, self_attention = 18, cross_attention = 19,
  mask_rows = 24, causal_conv1d = 25, gated_delta_rule = 26, ssd = 27, gated_rms_norm = 28,
  scale_columns = 29, selective_scan = 30,
  heads = 32, head_linear = 33
};

}  // namespace lowbit
