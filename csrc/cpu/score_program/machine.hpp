// SPDX-License-Identifier: Apache-2.0
// Implementation of the machine in vm.hpp.
#pragma once

#include "core/arena.hpp"
#include "cpu/score_program/memory.hpp"
#include "formats/format.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

using namespace score;

constexpr int kHeadCells = 16;

// Cells per register, for each rate.
struct BankSizes {
  int64_t of[6];
};
LOWBIT_INLINE BankSizes bank_sizes(int max_rows, int max_cols) {
  const int64_t rows = round_up(max_rows, 16), cols = round_up(max_cols, 16);
  return {{16, kHeadCells, rows, cols, rows + cols + 16, kStripScores}};
}
// Cells from one register of a rate to the next.
template <class T>
LOWBIT_INLINE int64_t bank_stride(const BankSizes& sizes, int rate) {
  return sizes.of[rate] + kRedZone / static_cast<int64_t>(sizeof(T));
}
// The registers of each rate; constants, 16 per register, are one array.
template <class T>
void take_banks(const ScorePlan& plan, int max_rows, int max_cols, Arena& arena, T* (&banks)[6]) {
  const BankSizes sizes = bank_sizes(max_rows, max_cols);
  const int64_t constants = static_cast<int64_t>(plan.constants.size());
  banks[0] = constants ? arena.array<T>(round_up(constants, 16)) : nullptr;
  for (int rate = 1; rate < 6; rate++)
    for (int i = 0; i < plan.registers[rate]; i++) {
      T* const cells = arena.array<T>(sizes.of[rate]);
      if (i == 0) banks[rate] = cells;
    }
}

// One instruction on one strip, with the operands of its elements.
template <class T>
class Runner {
 public:
  using Int = IntBeside<T>;

  Runner(ScoreMachine<T>& machine, const ScoreTile<T>& tile, T* gradient, int64_t gradient_stride,
         const CapturedGradient* captured)
      : m_(machine), tile_(tile), gradient_(gradient), gradient_stride_(gradient_stride), captured_(captured),
        sizes_(bank_sizes(machine.max_rows, machine.max_cols)) {}

  void run() {
    prepare();
    clear_sums();
    if (m_.plan->has(Stage::tile)) run_strips(0, tile_.rows);
    if (m_.plan->has(Stage::row_after)) run_line(Stage::row_after, tile_.rows);
    if (m_.plan->has(Stage::column_after)) run_line(Stage::column_after, tile_.cols);
    if (m_.plan->has(Stage::diagonal_after)) run_line(Stage::diagonal_after, tile_.rows + tile_.cols - 1);
    if (m_.plan->has(Stage::head_after)) run_line(Stage::head_after, 1);
  }

  void run_rows(int first, int count) {
    prepare();
    scores_row_ = first;
    run_strips(first, first + count);
  }

  // Runs the stages before the tile stage, so that later runs can skip them.
  void prepare() {
    const bool head = m_.fresh || m_.b != tile_.b || m_.h != tile_.h;
    const bool rows = head || m_.q0 != tile_.q0 || m_.rows != tile_.rows,
               cols = head || m_.k0 != tile_.k0 || m_.cols != tile_.cols;
    m_.fresh = false, m_.b = tile_.b, m_.h = tile_.h, m_.q0 = tile_.q0, m_.k0 = tile_.k0, m_.rows = tile_.rows,
    m_.cols = tile_.cols;
    if (m_.plan->has(Stage::head) && head) run_line(Stage::head, 1);
    if (m_.plan->has(Stage::row) && rows) run_line(Stage::row, tile_.rows);
    if (m_.plan->has(Stage::column) && cols) run_line(Stage::column, tile_.cols);
    if (m_.plan->has(Stage::diagonal) && (rows || cols)) run_line(Stage::diagonal, tile_.rows + tile_.cols - 1);
  }

  // The rows of the first gather with indices known before the tile stage and linear in q and k.
  MemoryRows rows_of_gather() {
    stage_ = Stage::tile, r0_ = c0_ = 0;
    const int tile_stage = static_cast<int>(Stage::tile);
    for (int at = m_.plan->begin[tile_stage]; at < m_.plan->begin[tile_stage + 1]; at++) {
      const ScoreStep& step = m_.plan->steps[at];
      if (step.op != number_of<score::Gather>()) continue;
      Source<T> indices[kMaxOperands];
      bool known = true;
      for (int j = 0; j < step.operand_count; j++)
        known &= step.operands[j].rate != Rate::tile, indices[j] = source(step.operands[j]);
      if (!known) continue;
      const TensorView& tensor = m_.call->captured()[step.immediate];
      const Plane plane =
          find_plane(tensor, indices, step.along.data(), step.down.data(), step.operand_count,
                     {.rows = tile_.rows, .count = tile_.cols, .width = tile_.cols}, tensor.stride.data());
      if (!plane.valid || plane.along != 1 || plane.down == 0) continue;
      const int64_t size = static_cast<int64_t>(size_of(tensor.dtype));
      return {tensor.as<const char>() + plane.start * size, tile_.rows, tile_.cols * size, plane.down * size};
    }
    return {};
  }

 private:
  // Runs a stage other than the tile stage, on one line of elements.
  void run_line(Stage stage, int count) {
    stage_ = stage, r0_ = c0_ = 0;
    run_steps({.rows = 1, .count = count, .width = static_cast<int>(round_up(count, 16))});
  }

  void run_strips(int first, int last) {
    stage_ = Stage::tile;
    const int columns = static_cast<int>(round_up(tile_.cols, 16));
    const int chunk = columns < kStripColumns ? columns : kStripColumns, strip_rows = kStripScores / chunk;
    for (c0_ = 0; c0_ < tile_.cols; c0_ += chunk) {
      const int count = tile_.cols - c0_ < chunk ? tile_.cols - c0_ : chunk;
      strip_stride_ = round_up(count, 16);
      for (r0_ = first; r0_ < last; r0_ += strip_rows)
        run_steps({.rows = last - r0_ < strip_rows ? last - r0_ : strip_rows,
                   .count = count,
                   .width = static_cast<int>(strip_stride_)});
    }
  }

  void run_steps(Extent extent) {
    const int stage = static_cast<int>(stage_);
    const ScoreStep* steps = m_.plan->steps.data();
    for (int at = m_.plan->begin[stage]; at < m_.plan->begin[stage + 1]; at++) run_step(steps[at], extent);
  }

  T* bank(ScoreOperand place) const {
    return m_.banks[static_cast<int>(place.rate)] + place.at * bank_stride<T>(sizes_, static_cast<int>(place.rate));
  }

  // Whether a view of a tensor can replace this register; caller memory (below 0) is not a register.
  static bool has_view(ScoreOperand place) { return place.rate == Rate::tile && place.at >= 0 && place.at < kViews; }

  Source<T> source(ScoreOperand place) const {
    if (place.at == kScoreMemory) return {tile_.scores + (r0_ - scores_row_) * tile_.stride + c0_, tile_.stride, true};
    if (place.at == kGradientMemory) return {gradient_ + r0_ * gradient_stride_ + c0_, gradient_stride_, true};
    if (place.rate == Rate::constant) return {m_.banks[0] + place.at, 0, false};
    T* const base = bank(place);
    const bool in_tile = stage_ == Stage::tile;
    switch (place.rate) {
      case Rate::head: return {base, 0, stage_ == Stage::head || stage_ == Stage::head_after};
      case Rate::row: return {base + r0_, 1, !in_tile};
      case Rate::column: return {base + c0_, 0, true};
      case Rate::diagonal: return {base + (in_tile ? tile_.rows - 1 - r0_ + c0_ : 0), -1, true};
      default:
        return has_view(place) && viewed_ >> place.at & 1 ? views_[place.at] : Source<T>{base, strip_stride_, true};
    }
  }

  void run_step(const ScoreStep& step, Extent extent) {
    Strip<T> strip;
    Source<T> in[kMaxOperands];
    unsigned vectors = 0;
    for (int j = 0; j < step.operand_count; j++)
      in[j] = source(step.operands[j]), vectors |= static_cast<unsigned>(in[j].vector) << j;
    if (step.op == number_of<ScatterAdd>()) {
      const CapturedGradient target = captured_ ? captured_[step.immediate] : CapturedGradient{};
      if (target.data) scatter_step(*m_.call, step, in[0], in + 1, target, extent);
      return;
    }
    if (step.op == number_of<Sum>()) return run_sum(step, in[0], extent);
    if (has_view(step.out)) viewed_ &= ~(1u << step.out.at);
    strip.out = const_cast<T*>(source(step.out).base), strip.out_stride = source(step.out).row_stride;
    switch (step.op) {
      case number_of<B>(): return iota(strip.out, tile_.b, 0, extent.width);
      case number_of<H>(): return iota(strip.out, tile_.h, 0, extent.width);
      case number_of<Q>(): return iota(strip.out, tile_.q0, 1, extent.width);
      case number_of<K>(): return iota(strip.out, tile_.k0, 1, extent.width);
      case number_of<KMinusQ>(): return iota(strip.out, tile_.k0 - tile_.q0 - (tile_.rows - 1), 1, extent.width);
      case number_of<score::Gather>(): return run_gather(step, in, strip.out, strip.out_stride, extent);
      default: break;
    }
    if (divides_ints(step.op)) check_divisor(in[1], extent);
    for (int j = 0; j < 3 && j < step.operand_count; j++) strip.in[j] = in[j];
    strip.rows = extent.rows, strip.width = extent.width;
    kStripKernels<T>[step.op].of[vectors](strip);
  }

  // If a view of the tensor can replace the register, nothing is copied: a bias then costs no more than reading it.
  // its reading.
  void run_gather(const ScoreStep& step, const Source<T>* indices, T* out, int64_t out_stride, Extent extent) {
    const TensorView& tensor = m_.call->captured()[step.immediate];
    const Plane plane = find_plane(tensor, indices, step.along.data(), step.down.data(), step.operand_count, extent,
                                   tensor.stride.data());
    constexpr DType kOwn = sizeof(T) == 4 ? DType::float32 : DType::float64;
    const bool stands_in = stage_ == Stage::tile && plane.valid && plane.along == 1 && tensor.dtype == kOwn &&
                           extent.count == extent.width && has_view(step.out);
    if (!stands_in) return gather_step(*m_.call, step, plane, indices, out, out_stride, extent);
    views_[step.out.at] = {tensor.as<const T>() + plane.start, plane.down, true};
    viewed_ |= 1u << step.out.at;
  }

  static void iota(T* out, int64_t first, int64_t step, int count) {
    Int* to = reinterpret_cast<Int*>(out);
    for (int i = 0; i < count; i++) to[i] = static_cast<Int>(first + i * step);
  }

  void check_divisor(const Source<T>& divisor, Extent extent) const {
    for (int64_t r = 0; r < extent.rows; r++)
      for (int c = 0; c < (divisor.vector ? extent.count : 1); c++)
        if (divisor.template row<Int>(r)[c] == 0) return note_fault(*m_.call, ScoreFault::kDivision, 0, 0);
  }

  void run_sum(const ScoreStep& step, const Source<T>& value, Extent extent) {
    T* to = bank(step.out);
    switch (step.out.rate) {
      case Rate::row: return sum_step(value, to + r0_, 1, false, extent);
      case Rate::column: return sum_step(value, to + c0_, 0, true, extent);
      case Rate::diagonal: return sum_step(value, to + tile_.rows - 1 - r0_ + c0_, -1, true, extent);
      default: return sum_step(value, to, 0, false, extent);
    }
  }

  void clear_sums() {
    for (const ScoreStep& step : m_.plan->steps)
      if (step.op == number_of<Sum>())
        std::memset(bank(step.out), 0, sizeof(T) * sizes_.of[static_cast<int>(step.out.rate)]);
  }

  ScoreMachine<T>& m_;
  const ScoreTile<T>& tile_;
  T* gradient_;
  int64_t gradient_stride_;
  const CapturedGradient* captured_;
  BankSizes sizes_;
  Stage stage_ = Stage::head;
  int r0_ = 0, c0_ = 0, scores_row_ = 0;
  int64_t strip_stride_ = 0;
  static constexpr int kViews = 16;
  Source<T> views_[kViews];  // tile registers that are views of captured tensors
  uint32_t viewed_ = 0;
};

template <class T>
void start(ScoreMachine<T>& machine, void* memory) {
  Arena arena{static_cast<char*>(memory)};
  take_banks(*machine.plan, machine.max_rows, machine.max_cols, arena, machine.banks);
  T* constants = machine.banks[0];
  for (const ScoreConstant& constant : machine.plan->constants) {
    if (constant.type == 'f') *constants = static_cast<T>(std::bit_cast<double>(constant.bits));
    else *reinterpret_cast<IntBeside<T>*>(constants) = static_cast<IntBeside<T>>(constant.bits);
    constants++;
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

// The functions of vm.hpp for one score type.
#define LOWBIT_MACHINE(T)                                                                           \
  void start_machine(ScoreMachine<T>& machine, void* memory) { start(machine, memory); }            \
  MemoryRows prepare_machine(ScoreMachine<T>& machine, const ScoreTile<T>& tile) {                  \
    Runner<T> runner(machine, tile, nullptr, 0, nullptr);                                           \
    runner.prepare();                                                                               \
    return runner.rows_of_gather();                                                                 \
  }                                                                                                 \
  void run_machine_rows(ScoreMachine<T>& machine, const ScoreTile<T>& tile, int first, int count) { \
    Runner<T>(machine, tile, nullptr, 0, nullptr).run_rows(first, count);                           \
  }                                                                                                 \
  void run_machine(ScoreMachine<T>& machine, const ScoreTile<T>& tile, T* gradient, int64_t stride, \
                   const CapturedGradient* captured) {                                              \
    Runner<T>(machine, tile, gradient, stride, captured).run();                                     \
  }
