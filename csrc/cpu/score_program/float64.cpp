// SPDX-License-Identifier: Apache-2.0
// Float64 scores are for gradient checks: the machine and the row of one instruction set serve all machines.
#include LOWBIT_ISA_HEADER

#include "cpu/score_program/machine.hpp"
#include "cpu/score_program/run_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses(const ScoreProgramArgs& args) {
  return args.dtype == DType::float64 ? "" : "for float64 scores";
}

constexpr Kernel<ScoreProgramArgs> kRows[] = {{LOWBIT_ROW("score_program_float64"), refuses, run_tile<double>}};

}  // namespace

LOWBIT_MACHINE(double)

void score_program_float64_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
