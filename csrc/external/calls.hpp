// SPDX-License-Identifier: Apache-2.0
// The arguments of each op in the form that rows of third parties get (lowbit/backend.h): Call<Args>(args).c is the C
// struct, valid while args and the Call live. Offering an op takes a line in the list below, a struct in the header and
// a constructor here.
#pragma once

#include <array>
#include <string_view>

#include "lowbit/backend.h"
#include "ops/attention.hpp"
#include "ops/blocks.hpp"
#include "ops/decode.hpp"
#include "ops/linear.hpp"
#include "ops/optim.hpp"
#include "ops/quantize.hpp"

namespace lowbit::external {

// The ops on offer, with the fields of their structs after `call`: F, or H for a tensor in host memory. score_program
// and block_classes, whose arguments are programs, are not offered.
#define LOWBIT_OFFERED_OPS(X)                                                                                       \
  X(linear, LinearArgs, F(weight) F(x) F(bias) F(mul) F(add) F(y) F(x_format) F(activation))                        \
  X(quantize, QuantizeArgs,                                                                                         \
    F(out) F(weight) F(importance) F(packed) H(distortion) F(mapping) F(scale_choice))                              \
  X(repack, RepackArgs, F(from) F(to) F(packed) F(out))                                                             \
  X(dequantize, DequantizeArgs, F(weight) F(packed) F(out) F(indices) H(outside))                                   \
  X(all_finite, AllFiniteArgs, F(tensor) H(result))                                                                 \
  X(blocks_linear, BlocksLinearArgs, F(weight) F(x) F(bias) F(y))                                                   \
  X(blocks_dequantize, BlocksDequantizeArgs, F(weight) F(out) F(begin))                                             \
  X(int8_linear, Int8LinearArgs, F(x) F(weight) F(row_scale) F(column_scale) F(bias) F(y))                          \
  X(optim_step, OptimStepArgs,                                                                                      \
    F(tensors) F(block_size) F(grad_scale) F(found_inf) F(lr) F(beta1) F(beta2) F(eps) F(weight_decay) F(momentum)  \
    F(dampening) F(decoupled) F(maximize) F(amsgrad) F(nesterov) F(rule) F(moments) F(format)                       \
    F(stochastic_rounding) F(seed))                                                                                 \
  X(encode_state, EncodeStateArgs, F(values) F(codes) F(scale) F(block_size) F(format) F(is_signed))                \
  X(decode_state, DecodeStateArgs, F(codes) F(scale) F(values) F(block_size) F(format) F(is_signed))                \
  X(attention_forward, AttentionForwardArgs,                                                                        \
    F(q) F(k) F(v) F(out) F(lse) F(max_scores) F(mask) F(sink) F(seed) F(kv_num_blocks) F(kv_indices)               \
    F(full_kv_num_blocks) F(full_kv_indices) F(q_block) F(kv_block) F(scale) F(dropout_p) F(causal))                \
  X(attention_backward, AttentionBackwardArgs,                                                                      \
    F(forward) F(grad_out) F(grad_lse) F(grad_q) F(grad_k) F(grad_v) F(grad_mask) F(grad_sink))                     \
  X(decode, DecodeArgs,                                                                                             \
    F(q) F(k) F(v) F(k_scale) F(v_scale) F(out) F(lse) F(mask) F(sink) F(position) F(window) F(scale) F(causal)     \
    F(rotated))                                                                                                     \
  X(kv_quantize, KvQuantizeArgs, F(x) F(codes) F(scale) F(rotate))                                                  \
  X(kv_dequantize, KvDequantizeArgs, F(codes) F(scale) F(x) F(rotated))

template <class Args>
struct Call;

#define F(field)
#define H(field)
#define LOWBIT_OP(op, Args, fields)   \
  template <>                         \
  struct Call<Args> {                 \
    explicit Call(const Args& args);  \
    lowbit_##op##_args c;             \
    std::array<TensorView, 5> views;  \
  };
LOWBIT_OFFERED_OPS(LOWBIT_OP)
#undef LOWBIT_OP
#undef F
#undef H

// Why no struct can represent these arguments, or "".
template <class Args>
std::string_view not_offered(const Args& args) {
  constexpr std::string_view kPrograms = "rows of third parties are not given a score_mod or a mask_mod";
  if constexpr (requires { args.forward; }) return not_offered(args.forward);
  else if constexpr (requires { args.score_mod; }) return args.score_mod || args.mask_mod ? kPrograms : "";
  else if constexpr (requires { args.low_rank; })
    return args.low_rank ? "rows of third parties are not given an adapter's product of low rank" : "";
  else if constexpr (requires { args.blocks; })
    return args.blocks ? "rows of third parties are not given blocks of MXFP4" : "";
  else if constexpr (requires { args.corrections; })
    return args.corrections.empty() ? "" : "rows of third parties are not given corrections of parameters";
  else return "";
}

}  // namespace lowbit::external
