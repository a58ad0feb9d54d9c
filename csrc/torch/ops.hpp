// SPDX-License-Identifier: Apache-2.0
// The ops registered with torch's dispatcher, each with its schema and kernel. A new op is one file with `<op>_op`, and
// its name here.
#pragma once

#include <string_view>

#include "torch/described.hpp"
#include "torch/symbols.hpp"

namespace lowbit::torch {

using CShim = void (*)();

struct RegisteredOp {
  std::string_view name;  // name in namespace lowbit
  const char* schema;
  BoxedKernel kernel;
  std::span<const Argument> arguments;
  Check check;  // raises the errors of the kernel for a call without data
  CShim c_shim;  // a C function (c_shim.hpp); null if the results are a list
  int results;   // number of results of c_shim
};

#define LOWBIT_TORCH_OPS(X) \
  X(linear) \
  X(gather_linear) \
  X(experts) \
  X(dequantize) \
  X(embedding) \
  X(fake_quantize) \
  X(fake_quantize_backward) \
  X(fake_quantize_activations) \
  X(float8_cast) \
  X(int8_pack) \
  X(block_sparse_linear) \
  X(attention_forward) \
  X(attention_backward) \
  X(decode) \
  X(kv_quantize) \
  X(kv_dequantize) \
  X(rms_norm) \
  X(rope_append) \
  X(run_program) \
  X(route) \
  X(sample) \
  X(layer_norm) \
  X(pointwise) \
  X(gated_delta_rule) \
  X(gated_delta_rule_backward) \
  X(gated_rms_norm) \
  X(gated_rms_norm_backward) \
  X(causal_conv1d) \
  X(causal_conv1d_backward) \
  X(ssd) \
  X(ssd_in_place) \
  X(ssd_backward) \
  X(selective_scan) \
  X(selective_scan_in_place) \
  X(selective_scan_backward) \
  X(linear_cross_entropy)

#define LOWBIT_OP(op) extern const RegisteredOp op##_op;
LOWBIT_TORCH_OPS(LOWBIT_OP)
#undef LOWBIT_OP

}  // namespace lowbit::torch
