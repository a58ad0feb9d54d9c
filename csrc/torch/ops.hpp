// SPDX-License-Identifier: Apache-2.0
// The ops that torch's dispatcher gets, each with its schema and CPU kernel. A new op is one file and one line in registration.cpp.
#pragma once

#include "torch/symbols.hpp"

namespace lowbit::torch {

struct Op {
  const char* name;    // in namespace lowbit
  const char* schema;
  BoxedKernel cpu;
};

extern const Op linear_op, dequantize_op;

}  // namespace lowbit::torch
