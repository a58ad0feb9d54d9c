// SPDX-License-Identifier: Apache-2.0
// The row of the op block_classes: scalar arithmetic, so one instruction set serves all machines.
#include LOWBIT_ISA_HEADER

#include "cpu/rows.hpp"
#include "cpu/score_program/classify.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr Kernel<BlockClassesArgs> kRows[] = {
    {LOWBIT_ROW("block_classes_intervals"), never_refuses<BlockClassesArgs>, classify_blocks}};

}  // namespace

void score_program_classes_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
