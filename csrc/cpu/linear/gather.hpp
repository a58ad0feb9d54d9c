// SPDX-License-Identifier: Apache-2.0
// The loop of the op gather_linear over the tasks of families (product.hpp). Rows are sorted by weight, so that each
// weight is read once for all of its rows:
//
//   order    rows of weight 0 | rows of weight 3 | ...           a counting sort; rows of a weight stay in order
//   ranges   at most kPass rows of one weight, in the family that suits so many rows of the weight
//   passes   ranges of about kPassRows rows: prepare all pieces, then multiply all tasks; bounds the scratch memory
//
// The regions of all passes are those of one team: one parallel region per call.
#pragma once

#include <cstring>

#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"
#include "cpu/linear/weight_order.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A family of product.hpp as a value, so that the loop is compiled once for all of them. `rows`: a Rows in memory.
struct Family {
  int64_t pass;  // rows of a Rows, at most
  PanelCut cut;
  void (*make)(void* rows, const XView& x, const WeightSpec& spec, int64_t count, Arena& arena);
  int64_t (*pieces)(const void* rows);
  void (*prepare)(const void* rows, const WeightSpec& spec, int64_t piece);
  RowBlocks (*blocks)(const void* rows, const WeightSpec& spec);
  void (*multiply)(const void* rows, const PackedWeight& weight, const Sink& sink, Span block, Span panels);
};

constexpr int64_t kRowsBytes = 160;  // of a Rows of any family

template <class Rows>
constexpr Family kFamily = {
    .pass = Rows::kPass,
    .cut = Rows::kCut,
    .make =
        [](void* rows, const XView& x, const WeightSpec& spec, int64_t count, Arena& arena) {
          static_assert(sizeof(Rows) <= kRowsBytes);
          const Rows made(x, spec, count, arena);
          std::memcpy(rows, &made, sizeof made);
        },
    .pieces = [](const void* rows) { return static_cast<const Rows*>(rows)->pieces(); },
    .prepare = [](const void* rows, const WeightSpec& spec,
                  int64_t piece) { static_cast<const Rows*>(rows)->prepare(spec, piece); },
    .blocks = [](const void* rows, const WeightSpec& spec) { return static_cast<const Rows*>(rows)->blocks(spec); },
    .multiply = [](const void* rows, const PackedWeight& weight, const Sink& sink, Span block,
                   Span panels) { static_cast<const Rows*>(rows)->multiply(weight, sink, block, panels); }};

// The family for so many rows of one weight.
using ChooseFamily = const Family& (*)(const GatherLinearArgs& args, int64_t rows);

// Rows of one weight. pieces, tasks: the number of them in this range and those before it in its pass.
struct GatherRange {
  const Family* family;
  int64_t weight, first, count, chunk, pieces, tasks;
  alignas(8) char rows[kRowsBytes];
};

// The ranges of one pass.
class GatherPass {
 public:
  GatherPass(const GatherLinearArgs& args, const WeightOrder& order, GatherRange* ranges, int64_t count)
      : args_(args), order_(order), ranges_(ranges), count_(count) {}

  void run() {
    Arena counted;
    for (int64_t r = 0; r < count_; r++) make(ranges_[r], counted);
    const Scratch memory(counted.bytes);
    Arena arena = memory.arena();
    for (int64_t r = 0; r < count_; r++) make(ranges_[r], arena);
    const WeightSpec& spec = args_.weight_spec;
    int64_t rows = 0;
    for (int64_t r = 0; r < count_; r++) rows += ranges_[r].count;
    const int threads = threads_for_products(rows, spec);
    cut(threads);
    const GatherRange& last = ranges_[count_ - 1];
    parallel_for(last.pieces, threads_for(rows * spec.padded_k()), [&](int64_t piece) {
      const int64_t r = find(&GatherRange::pieces, piece);
      ranges_[r].family->prepare(ranges_[r].rows, spec, piece - (r ? ranges_[r - 1].pieces : 0));
    });
    parallel_for(last.tasks, threads, [&](int64_t task) {
      const int64_t r = find(&GatherRange::tasks, task);
      multiply(ranges_[r], task - (r ? ranges_[r - 1].tasks : 0));
    });
  }

 private:
  void make(GatherRange& range, Arena& arena) const {
    const XView x{.x = args_.x.data, .dtype = args_.x.dtype, .format = args_.x_format, .k = args_.weight_spec.k,
                  .index = order_.x_row + range.first};
    range.family->make(range.rows, x, args_.weight_spec, range.count, arena);
  }

  void cut(int threads) {
    const int64_t panels = args_.weight_spec.panels();
    int64_t pieces = 0, tasks = 0;
    for (int64_t r = 0; r < count_; r++) {
      GatherRange& range = ranges_[r];
      range.chunk = range.family->cut.chunk(panels * count_, threads);
      range.pieces = pieces += range.family->pieces(range.rows);
      range.tasks = tasks +=
          range.family->blocks(range.rows, args_.weight_spec).count * ceil_div(panels, range.chunk);
    }
  }

  // The range that has this piece or task.
  int64_t find(int64_t GatherRange::* end, int64_t number) const {
    int64_t first = 0, last = count_ - 1;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (number < ranges_[middle].*end) last = middle;
      else first = middle + 1;
    }
    return first;
  }

  void multiply(const GatherRange& range, int64_t task) const {
    const WeightSpec& spec = args_.weight_spec;
    const int64_t panels = spec.panels(), chunks = ceil_div(panels, range.chunk);
    const PackedWeight weight{spec, args_.weight.as<const uint8_t>() + range.weight * panels * spec.panel_bytes()};
    const TensorView& bias = args_.bias;
    const int64_t bias_bytes = bias ? spec.n * static_cast<int64_t>(size_of(bias.dtype)) : 0;
    const Sink sink{.y = args_.y.data, .dtype = args_.y.dtype,
                    .bias = bias ? bias.as<const char>() + range.weight * bias_bytes : nullptr,
                    .bias_dtype = bias.dtype, .index = order_.y_row + range.first};
    range.family->multiply(range.rows, weight, sink, range.family->blocks(range.rows, spec).at(task / chunks),
                           piece_of(panels, range.chunk, task % chunks));
  }

  const GatherLinearArgs& args_;
  const WeightOrder& order_;
  GatherRange* const ranges_;
  const int64_t count_;
};

constexpr int64_t kPassRows = 1024;

inline void run_passes(const GatherLinearArgs& args, const WeightOrder& order, ChooseFamily choose) {
  const Scratch memory(smaller(kPassRows, args.rows()) * static_cast<int64_t>(sizeof(GatherRange)));
  GatherRange* const ranges = memory.as<GatherRange>();
  int64_t count = 0, rows = 0;
  for (int64_t e = 0; e < args.weights(); e++) {
    const int64_t first = order.begin[e], rows_of_e = order.begin[e + 1] - first;
    if (rows_of_e == 0) continue;
    const Family& family = choose(args, rows_of_e);
    const RowTiles parts(rows_of_e, family.pass);
    for (int64_t part = 0; part < parts.count; part++) {
      ranges[count++] = {.family = &family, .weight = e, .first = first + parts.begin(part),
                         .count = parts.height(part), .chunk = 0, .pieces = 0, .tasks = 0, .rows = {}};
      rows += parts.height(part);
      if (rows < kPassRows) continue;
      GatherPass(args, order, ranges, count).run();
      count = rows = 0;
    }
  }
  if (count) GatherPass(args, order, ranges, count).run();
}

inline void gather_by(const GatherLinearArgs& args, ChooseFamily choose) {
  const auto lists = [&](Arena& arena) {
    return WeightOrder{.begin = arena.array<int32_t>(args.weights() + 1), .y_row = arena.array<int32_t>(args.rows()),
                       .x_row = arena.array<int32_t>(args.rows())};
  };
  Arena counted;
  lists(counted);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  const WeightOrder order = lists(arena);
  sort_rows(args, order);
  auto run = [&] { run_passes(args, order, choose); };
  threads_for_products(args.rows(), args.weight_spec) > 1 ? as_team(run) : run();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
