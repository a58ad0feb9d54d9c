// SPDX-License-Identifier: Apache-2.0
// One program over one tile of scores.
#pragma once

#include "cpu/rows.hpp"
#include "cpu/score_program/vm.hpp"
#include "core/scratch.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Rows of whole vectors: the given ones, or a padded copy in `memory` if those are too narrow.
template <class T>
struct PaddedRows {
  T* data;
  int64_t stride;

  PaddedRows(const ScoreProgramArgs& args, void* given, T* memory) : data(static_cast<T*>(given)), stride(args.stride) {
    if (!given || !memory) return;
    data = memory, stride = round_up(args.cols, 16);
    copy(args, data, stride, static_cast<const T*>(given), args.stride);
  }
  void write_back(const ScoreProgramArgs& args, void* given) const {
    if (data != given) copy(args, static_cast<T*>(given), args.stride, data, stride);
  }

 private:
  static void copy(const ScoreProgramArgs& args, T* to, int64_t to_stride, const T* from, int64_t from_stride) {
    for (int r = 0; r < args.rows; r++)
      __builtin_memcpy(to + r * to_stride, from + r * from_stride, args.cols * sizeof(T));
  }
};

template <class T>
void run_tile(const ScoreProgramArgs& args) {
  args.call->check_captured();
  const bool backward = args.gradient != nullptr;
  const ScoreProgram& program = args.call->program();
  const ScorePlan& plan = backward ? program.backward : program.forward;
  const Scratch registers(static_cast<int64_t>(ScoreVm<T>::bytes(plan, args.rows, args.cols)));
  ScoreVm<T> vm(*args.call, plan, args.rows, args.cols, registers.as<void>());
  const bool pads = args.stride < round_up(args.cols, 16);
  const int64_t padded = args.rows * round_up(args.cols, 16);
  const Scratch rows(pads ? 2 * padded * static_cast<int64_t>(sizeof(T)) : 0);
  T* const memory = pads ? rows.as<T>() : nullptr;
  const PaddedRows<T> scores(args, args.scores, memory),
      gradient(args, args.gradient, memory ? memory + padded : nullptr);
  const ScoreTile<T> tile{.b = args.b, .h = args.h, .q0 = args.q0, .k0 = args.k0, .rows = args.rows, .cols = args.cols,
                          .scores = scores.data, .stride = scores.stride};
  if (backward) {
    vm.run(tile, gradient.data, gradient.stride, args.captured_gradients);
    gradient.write_back(args, args.gradient);
  } else {
    vm.run(tile);
    scores.write_back(args, args.scores);
  }
  args.call->check_fault();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
