// SPDX-License-Identifier: Apache-2.0
// The row of the op score_program for float32 scores.
#include LOWBIT_ISA_HEADER

#include "cpu/score_program/run_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses(const ScoreProgramArgs& args) {
  return args.dtype == DType::float64 ? "scores are float64" : "";
}

constexpr Kernel<ScoreProgramArgs> kRows[] = {{LOWBIT_ROW("score_program_float32"), refuses, run_tile<float>}};

}  // namespace

void score_program_row_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
