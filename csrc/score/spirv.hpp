// SPDX-License-Identifier: Apache-2.0
// Score programs as a module of SPIR-V 1.2, for a driver to link to a kernel that imports them. What is compiled is the
// text that print.hpp makes for OpenCL C: what a score op computes is said once. No compiler is asked.
//
//   float <name>(float score, int b, int h, int q, int k, const ulong* captured)
//   float <name>(float score, float gradient, int b, int h, int q, int k, const ulong* captured)   of a gradient
//
// `captured` lies in device memory (score_table): the address of the fault, those of the captured tensors, those where
// their gradients are added up (float32; 0: not wanted), then the layout.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "score/program.hpp"

namespace lowbit {

struct ScoreFunction {
  const ScoreCall* call;  // null: returns what it is given
  bool gradient;
  std::string name;  // that the module exports
};

// sums: gradients are added up by a function that the module imports,
// void add_to_sum(float* to, float value, int* fault).
LOWBIT_API std::vector<uint32_t> score_spirv(std::span<const ScoreFunction> functions, bool sums = false);

// What `captured` of a function points to. gradients: per captured tensor, or none at all.
LOWBIT_API std::vector<uint64_t> score_table(const ScoreCall& call, const int32_t* fault,
                                             std::span<float* const> gradients = {});

}  // namespace lowbit
