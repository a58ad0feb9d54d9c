// SPDX-License-Identifier: Apache-2.0
// The ops that torch's dispatcher gets, each with its schema and kernel. A new op is one file, and its name here and in
// registration.cpp.
#pragma once

#include <string_view>

#include "torch/symbols.hpp"

namespace lowbit::torch {

struct RegisteredOp {
  std::string_view name;  // in namespace lowbit
  const char* schema;
  BoxedKernel kernel;
};

extern const RegisteredOp linear_op, dequantize_op, attention_forward_op, attention_backward_op, decode_op,
    kv_quantize_op, kv_dequantize_op;

}  // namespace lowbit::torch
