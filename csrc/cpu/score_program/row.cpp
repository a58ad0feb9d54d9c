// SPDX-License-Identifier: Apache-2.0
// The row of the op score_program: one program over one tile.
#include LOWBIT_ISA_HEADER

#include "cpu/scratch.hpp"
#include "cpu/rows.hpp"
#include "cpu/score_program/vm.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class T>
void run_args(const ScoreProgramArgs& args) {
  const bool backward = args.gradient != nullptr;
  const ScoreProgram& program = args.call->program();
  const ScorePlan& plan = backward ? program.backward : program.forward;
  ScoreVm<T> vm(*args.call, plan, args.rows, args.cols, scratch(Scratch::task, ScoreVm<T>::bytes(plan, args.rows, args.cols)));
  const ScoreTile<T> tile{.b = args.b, .h = args.h, .q0 = args.q0, .k0 = args.k0, .rows = args.rows, .cols = args.cols,
                          .scores = static_cast<T*>(args.scores), .stride = args.stride};
  if (!backward) return vm.run(tile);
  vm.run(tile, static_cast<T*>(args.gradient), args.stride, args.captured_gradients);
}

void run_row(const ScoreProgramArgs& args) {
  args.call->check_captured();
  args.dtype == DType::float64 ? run_args<double>(args) : run_args<float>(args);
  args.call->check_fault();
}

constexpr Kernel<ScoreProgramArgs> kRows[] = {{LOWBIT_ROW("score_program_vm"), never_refuses<ScoreProgramArgs>, run_row}};

}  // namespace

void score_program_row_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
