// SPDX-License-Identifier: Apache-2.0
// The float32 machine of vm.hpp; compiled once per instruction set.
#include LOWBIT_ISA_HEADER

#include "cpu/score_program/machine.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {

std::size_t machine_bytes(const ScorePlan& plan, int max_rows, int max_cols, std::size_t cell) {
  Arena counted;
  double* doubles[6];
  float* floats[6];
  if (cell == sizeof(double)) take_banks(plan, max_rows, max_cols, counted, doubles);
  else take_banks(plan, max_rows, max_cols, counted, floats);
  return static_cast<std::size_t>(counted.bytes);
}

LOWBIT_MACHINE(float)

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
