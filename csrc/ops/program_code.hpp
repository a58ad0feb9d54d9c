// SPDX-License-Identifier: Apache-2.0
// The integers of a program (program.hpp), as python/lowbit/ops/program.py writes them. Saved .pt2 files contain them:
// the meaning of a number never changes, and a new field of a step comes last and has a default.
//
//   kind         fields; "= ..." is the default of an optional one
//   score        the integers of a score program
//   columns      x, columns
//   rms_norm     x, weight, eps, offset, add = none
//   linear       x, weight, n, k, format, group_size, asymmetric, x_format, bias = none, activation = 0, mul = none,
//                add = none, row = 0, into = none, first_column = 0
//   rope_append  qkv, cos, sin, keys, values, start, q_weight = none, k_weight = none, eps = 0, offset = 0
//   attention    q, keys, values, start, scale, mask = none, causal = 0, score = none, sink = none
//
// An operand is 4 * index + 0 for a constant, 1 for a state, 2 for an input, 3 for a result; -1 is none. A real number
// is stored as the integer with its bits.
#pragma once

#include <cstdint>
#include <string_view>

namespace lowbit {

inline constexpr std::string_view kRunProgram = "run_program";
inline constexpr int64_t kProgramVersion = 1;

enum class StepKind : int64_t { score = 1, columns = 2, rms_norm = 3, linear = 4, rope_append = 5, attention = 6 };

}  // namespace lowbit
