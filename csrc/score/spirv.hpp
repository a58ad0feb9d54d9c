// SPDX-License-Identifier: Apache-2.0
// Score programs as a module of SPIR-V 1.2, for a driver to link to a kernel that imports them; needs no compiler.
//
//   float <name>(float score, int b, int h, int q, int k, const ulong* captured)
//   float <name>(float score, float gradient, int b, int h, int q, int k, const ulong* captured)   for a gradient
//
// Each step of a plan is a call of an imported function. All but score_add are in the module score_ops of the build:
//
//   uint score_<Op>(uint a, uint b, uint c)     an op of score/ops.hpp; 0 for missing operands
//   void score_check_divisor(const ulong* captured, int divisor)
//   long score_index(const ulong* captured, int size_at, int stride_at, int tensor, int dim, long at, int index)
//   uint score_element(const ulong* captured, int tensor, int dtype, long at)
//   void score_add(const ulong* captured, int tensor, long at, uint value)     adds to a captured tensor's gradient
//
// A uint has the bits of a float or an int, or a bool as 0 or 1. `captured` is in device memory (score_table): the
// address of the fault (print.hpp), those of the captured tensors, and the layout.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "score/program.hpp"

namespace lowbit {

struct ScoreFunction {
  const ScoreCall* call;  // null: returns its argument
  bool gradient;
  std::string name;  // exported name
};

// sums: gradients of captured tensors are accumulated, by score_add.
LOWBIT_API std::vector<uint32_t> score_spirv(std::span<const ScoreFunction> functions, bool sums = false);

// The table that `captured` points to.
LOWBIT_API std::vector<uint64_t> score_table(const ScoreCall& call, const int32_t* fault);

}  // namespace lowbit
