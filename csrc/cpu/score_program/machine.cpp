// SPDX-License-Identifier: Apache-2.0
// The machine of vm.hpp for float32; compiled once per instruction set.
#include LOWBIT_ISA_HEADER

#include "cpu/score_program/machine.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {

std::size_t machine_bytes(const ScorePlan& plan, int max_rows, int max_cols, std::size_t cell) {
  const BankSizes sizes = bank_sizes(max_rows, max_cols);
  int64_t cells = 0;
  for (int rate = 0; rate < 6; rate++) cells += registers_of(plan, rate) * sizes.of[rate];
  return static_cast<std::size_t>(cells) * cell;
}

LOWBIT_MACHINE(float)

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
