// SPDX-License-Identifier: Apache-2.0
// Runs a plan of a score program over tiles of scores: a register machine whose instructions process strips of up to
// 1024 scores, so that dispatch (2 ns, Zen 5) is amortized and all registers stay in L1. One machine per thread, plan
// and call. The code is in machine.hpp, compiled once per instruction set, for double in only one (float64.cpp);
// kernels of other ops include this header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/upcoming.hpp"
#include "ops/score_program.hpp"

// An instruction set that adds nothing to another one uses that one's machine.
#ifndef LOWBIT_SERVED_BY
#define LOWBIT_SERVED_BY LOWBIT_ISA_NAME
#endif

namespace lowbit::cpu::LOWBIT_SERVED_BY {

constexpr int kStripScores = 1024, kStripColumns = 256;

// A tile of scores: row r, column c at scores[r * stride + c] is for query q0 + r and key k0 + c. Every row is readable
// and writable up to column round_up(cols, 16); columns from cols on are unspecified afterwards.
template <class T>
struct ScoreTile {
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
  T* scores = nullptr;
  int64_t stride = 0;
};

template <class T>
struct ScoreMachine {
  const ScoreCall* call = nullptr;
  const ScorePlan* plan = nullptr;
  int max_rows = 0, max_cols = 0;
  T* banks[6] = {};  // registers per rate (Rate), in cells of T; ints and bools have cells of the same size

  // The tile for which the registers of low rates were computed.
  bool fresh = true;
  int64_t b = 0, h = 0, q0 = 0, k0 = 0;
  int rows = 0, cols = 0;
};

std::size_t machine_bytes(const ScorePlan& plan, int max_rows, int max_cols, std::size_t cell);
void start_machine(ScoreMachine<float>& machine, void* memory);
void start_machine(ScoreMachine<double>& machine, void* memory);
// Computes the tile's registers for rows, columns and diagonals. Returns the rows of a captured tensor that a run will
// read in place or convert, one per row of the tile (a bias [..., q, k]), for the caller to prefetch.
MemoryRows prepare_machine(ScoreMachine<float>& machine, const ScoreTile<float>& tile);
MemoryRows prepare_machine(ScoreMachine<double>& machine, const ScoreTile<double>& tile);
// Runs a forward plan over `count` rows of the tile from row `first` on; tile.scores points to row `first`.
void run_machine_rows(ScoreMachine<float>& machine, const ScoreTile<float>& tile, int first, int count);
void run_machine_rows(ScoreMachine<double>& machine, const ScoreTile<double>& tile, int first, int count);
void run_machine(ScoreMachine<float>& machine, const ScoreTile<float>& tile, float* gradient, int64_t stride,
                 const CapturedGradient* captured);
void run_machine(ScoreMachine<double>& machine, const ScoreTile<double>& tile, double* gradient, int64_t stride,
                 const CapturedGradient* captured);

}  // namespace lowbit::cpu::LOWBIT_SERVED_BY

namespace lowbit::cpu::LOWBIT_ISA_NAME {

using namespace LOWBIT_SERVED_BY;

namespace {

template <class T>
class ScoreVm {
 public:
  static std::size_t bytes(const ScorePlan& plan, int max_rows, int max_cols) {
    return machine_bytes(plan, max_rows, max_cols, sizeof(T));
  }

  // `memory`: 64-byte aligned, of bytes(); tiles have at most max_rows x max_cols scores.
  ScoreVm(const ScoreCall& call, const ScorePlan& plan, int max_rows, int max_cols, void* memory)
      : machine_{.call = &call, .plan = &plan, .max_rows = max_rows, .max_cols = max_cols} {
    start_machine(machine_, memory);
  }

  // Plan `forward`: turns raw scores into modified scores (a mask: the score or -inf), in place.
  void run(const ScoreTile<T>& tile) {
    if (!machine_.plan->empty()) run_machine(machine_, tile, nullptr, 0, nullptr);
  }
  // Plan `backward` or `backward_only`: reads raw scores and turns `gradient`, of the modified scores, into that of the
  // raw scores, in place; `captured` has one entry per captured tensor (backward_only: null).
  void run(const ScoreTile<T>& raw, T* gradient, int64_t stride, const CapturedGradient* captured) {
    if (!machine_.plan->empty()) run_machine(machine_, raw, gradient, stride, captured);
  }

 private:
  ScoreMachine<T> machine_;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
