// SPDX-License-Identifier: Apache-2.0
// One program over one tile of scores.
#pragma once

#include "cpu/rows.hpp"
#include "cpu/score_program/vm.hpp"
#include "cpu/scratch.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class T>
void run_tile(const ScoreProgramArgs& args) {
  args.call->check_captured();
  const bool backward = args.gradient != nullptr;
  const ScoreProgram& program = args.call->program();
  const ScorePlan& plan = backward ? program.backward : program.forward;
  ScoreVm<T> vm(*args.call, plan, args.rows, args.cols,
                scratch(Scratch::task, ScoreVm<T>::bytes(plan, args.rows, args.cols)));
  const ScoreTile<T> tile{.b = args.b, .h = args.h, .q0 = args.q0, .k0 = args.k0, .rows = args.rows, .cols = args.cols,
                          .scores = static_cast<T*>(args.scores), .stride = args.stride};
  if (backward) vm.run(tile, static_cast<T*>(args.gradient), args.stride, args.captured_gradients);
  else vm.run(tile);
  args.call->check_fault();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
