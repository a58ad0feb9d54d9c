// SPDX-License-Identifier: Apache-2.0
// The loop of the op experts over the tasks of families (families.hpp), as phases of one team: one parallel region per
// call. A pass is a sequence of ranges of pairs (token, expert), sorted by expert:
//
//   prepare    rows of x for the first product: once for all experts, if a family finds rows by index
//   gate_up    tasks (range, block of rows, columns of I): gate and up, then hidden = act(gate, up)
//   prepare    rows of hidden
//   down       a task is a range of columns of y; all ranges of the pass in turn: sums += router weight * product
//
// So each sum of y is computed by one thread, in the order of experts, and then of the pairs of an expert: the same
// bits for any number of threads, and no memory of the size of pairs times y. Sums are float32, [chunk of
// columns][tokens] [columns of the chunk], and are kept over the passes of a block of tokens.
#pragma once

#include "cpu/linear/families.hpp"
#include "cpu/linear/gate.hpp"
#include "cpu/linear/weight_order.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kBlockTokens = 4096, kPassPairs = 4096;
constexpr int64_t kSumBytes = 1 << 20;  // sums of a chunk, to which a thread adds in every pass

class ExpertsBlock {
 public:
  ExpertsBlock(const ExpertsArgs& args, ChooseFamily choose, int64_t first, int64_t tokens)
      : args_(args), choose_(choose), first_(first), tokens_(tokens), pairs_(tokens * args.each()),
        gate_up_{args.gate_up.spec, args.gate_up.packed, args.gate_up.bias},
        down_{args.down.spec, args.down.packed, args.down.bias}, chunk_(panels_of_a_task()) {}

  void run() {
    Arena counted;
    take(counted);
    const Scratch memory(counted.bytes);
    Arena arena = memory.arena();
    take(arena);
    sort_pairs(args_, first_, tokens_, order_);
    order_factors();
    shared_.family = each_finds_rows();
    Arena counted_rows;
    make_shared(counted_rows);
    const Scratch rows(counted_rows.bytes);
    Arena rows_arena = rows.arena();
    make_shared(rows_arena);
    prepare_shared();
    int64_t count = 0, pairs = 0;
    bool begins = true;
    for (int64_t e = 0; e < args_.experts(); e++) {
      const int64_t first = order_.begin[e], pairs_of_e = order_.begin[e + 1] - first;
      if (pairs_of_e == 0) continue;
      const Family &up = family(args_.gate_up, pairs_of_e), &down = family(args_.down, pairs_of_e);
      const RowTiles parts(pairs_of_e, smaller(up.pass, down.pass));
      for (int64_t part = 0; part < parts.count; part++) {
        up_products_[count].family = &up, down_products_[count].family = &down;
        ranges_[count++] = {e, first + parts.begin(part), parts.height(part)};
        pairs += parts.height(part);
        if (pairs < kPassPairs) continue;
        run_pass(count, begins, false);
        count = pairs = 0, begins = false;
      }
    }
    run_pass(count, begins, true);
  }

 private:
  const Family& family(const ExpertWeights& weights, int64_t rows) const {
    return choose_(weights.spec, weights.x_format, args_.x.dtype, rows);
  }

  // Columns of y per task, in panels.
  int64_t panels_of_a_task() const {
    PanelCut cut = family(args_.down, ceil_div(larger(1, pairs_), args_.experts())).cut;
    cut.max = larger(1, smaller(cut.max, kSumBytes / (larger(1, tokens_) * kPanelColumns * int64_t{sizeof(float)})));
    return cut.chunk(down_.spec.panels(), threads());
  }
  int threads() const { return threads_for_products(pairs_, down_.spec); }
  int64_t sums_of_a_task() const { return tokens_ * chunk_ * kPanelColumns; }

  void take(Arena& arena) {
    const int64_t most = smaller(kPassPairs, pairs_);
    order_ = {.begin = arena.array<int32_t>(args_.experts() + 1), .y_row = arena.array<int32_t>(pairs_),
              .x_row = arena.array<int32_t>(pairs_)};
    factors_ = arena.array<float>(pairs_);
    ranges_ = arena.array<RowRange>(most);
    up_products_ = arena.array<RangeProduct>(most);
    down_products_ = arena.array<RangeProduct>(most);
    sums_ = arena.array<float>(ceil_div(down_.spec.panels(), chunk_) * sums_of_a_task());
  }

  // Router weights in pair order.
  void order_factors() const {
    const Scratch memory(round_up(pairs_, 16) * static_cast<int64_t>(sizeof(float)));
    float* const all = memory.as<float>();
    for (int64_t i = 0; i < pairs_; i += 16)
      store(all + i, load_as_float(args_.weights.data, args_.weights.dtype, first_ * args_.each() + i, pairs_ - i));
    for (int64_t i = 0; i < order_.begin[args_.experts()]; i++) factors_[i] = all[order_.y_row[i]];
  }

  // The family that finds rows of x by index and serves some expert, or null.
  const Family* each_finds_rows() const {
    for (int64_t e = 0; e < args_.experts(); e++) {
      const int64_t pairs = order_.begin[e + 1] - order_.begin[e];
      if (pairs && family(args_.gate_up, pairs).find) return &family(args_.gate_up, pairs);
    }
    return nullptr;
  }

  // Rows of x for that family, prepared once for all experts.
  void make_shared(Arena& arena) {
    if (shared_.family) shared_.family->make(shared_.rows, x(), gate_up_.spec, tokens_, arena);
  }
  void prepare_shared() {
    shared_.index = order_.x_row;
    if (!shared_.family) return;
    parallel_for(shared_.family->pieces(shared_.rows), threads_for(tokens_ * gate_up_.spec.padded_k()),
                 [&](int64_t piece) { shared_.family->prepare(shared_.rows, gate_up_.spec, piece); });
  }

  // The tokens of the block.
  XView x() const {
    const int64_t k = gate_up_.spec.k;
    return {.x = args_.x.as<const char>() + first_ * k * static_cast<int64_t>(size_of(args_.x.dtype)),
            .dtype = args_.x.dtype, .format = args_.gate_up.x_format, .k = k};
  }

  // begins, ends: whether this is the first or the last pass of the block.
  void run_pass(int64_t count, bool begins, bool ends) {
    const PassProduct up(gate_up_.spec, ranges_, up_products_, count, &shared_),
        down(down_.spec, ranges_, down_products_, count);
    const int64_t first = count ? ranges_[0].first : 0;
    Arena counted;
    make(up, down, first, counted);
    const Scratch memory(counted.bytes);
    Arena arena = memory.arena();
    void* const hidden = make(up, down, first, arena);
    up.prepare();
    up.for_tasks(ceil_div(down_.spec.k, kPanelColumns), [&](const RangeTask& task, const RangeTask& next) {
      gate_up(up, task, next, static_cast<char*>(hidden), first);
    });
    down.prepare();
    const int64_t panels = down_.spec.panels();
    parallel_for(ceil_div(panels, chunk_), threads(), [&](int64_t task) {
      add_up(down, piece_of(panels, chunk_, task), sums_ + task * sums_of_a_task(), begins, ends);
    });
  }

  // Allocates the memory of a pass; returns that of hidden, [pairs][I] in the dtype of x.
  void* make(const PassProduct& up, const PassProduct& down, int64_t first, Arena& arena) const {
    const DType dtype = args_.x.dtype;
    XView rows = x();
    rows.index = order_.x_row;
    up.make(rows, 0, arena);
    void* const hidden = arena.array<char>(up.rows() * down_.spec.k * static_cast<int64_t>(size_of(dtype)));
    down.make({.x = hidden, .dtype = dtype, .format = args_.down.x_format, .k = down_.spec.k}, first, arena);
    return hidden;
  }

  // The columns of hidden of a task, and the panels of gate_up that have them.
  Span columns(const RangeTask& task) const {
    return {task.part.begin * kPanelColumns, smaller(down_.spec.k, task.part.end * kPanelColumns)};
  }
  GatePanels gate_panels(const RangeTask& task) const { return {args_.gate, down_.spec.k, columns(task)}; }

  // next: the task that follows. first: the pair whose row of hidden is row 0.
  void gate_up(const PassProduct& up, const RangeTask& task, const RangeTask& next, char* hidden,
               int64_t first) const {
    const RowRange& range = up.range(task.r);
    const Span block = task.block, of = columns(task);
    const GatePanels panels = gate_panels(task);
    const int64_t stride = panels.stride(), width = down_.spec.k;
    const Scratch memory((block.count() * stride + 16) * static_cast<int64_t>(sizeof(float)));  // vectors of 16
    float* sums = memory.as<float>();
    const uint8_t* const after = gate_up_.panel(up.range(next.r).weight, gate_panels(next).gates.begin);
    const auto multiply = [&](Span part, const uint8_t* upcoming) {
      Sink sink = gate_up_.sink(range.weight, sums, DType::float32, stride);
      sink.first = -block.begin, sink.column = part.begin * kPanelColumns;
      up.multiply(task.r, gate_up_.weight(range.weight, upcoming), sink, block, part);
      sums += part.count() * kPanelColumns;
    };
    const bool has_ups = panels.ups.count() > 0;
    multiply(panels.gates, has_ups ? gate_up_.panel(range.weight, panels.ups.begin) : after);
    if (has_ups) multiply(panels.ups, after);
    for (int64_t row = block.begin; row < block.end; row++)
      gate_row(args_.gate, panels, memory.as<float>() + (row - block.begin) * stride, of.count(), hidden,
               args_.x.dtype, (range.first - first + row) * width + of.begin);
  }

  // panels: of y.
  void add_up(const PassProduct& down, Span panels, float* sums, bool begins, bool ends) const {
    const int64_t stride = chunk_ * kPanelColumns;
    if (begins) std::memset(sums, 0, sums_of_a_task() * sizeof(float));
    for (int64_t r = 0; r < down.count(); r++) {
      const RowRange& range = down.range(r);
      Sink sink = down_.sink(range.weight, sums, DType::float32, stride);
      sink.column = panels.begin * kPanelColumns;
      sink.index = order_.x_row + range.first, sink.factor = factors_ + range.first;
      // After the last range those of the first one, of the next columns.
      const bool last = r + 1 == down.count();
      const uint8_t* const next = down_.panel(down.range(last ? 0 : r + 1).weight, last ? panels.end : panels.begin);
      const RowBlocks blocks = down.blocks(r);
      for (int64_t block = 0; block < blocks.count; block++)
        down.multiply(r, down_.weight(range.weight, next), sink, blocks.at(block), panels);
    }
    if (!ends) return;
    const int64_t n = down_.spec.n;
    for (int64_t t = 0; t < tokens_; t++)
      for (int64_t column = panels.begin * kPanelColumns, i = 0; column < smaller(n, panels.end * kPanelColumns);
           column += 16, i += 16)
        store_from_float(args_.y.data, args_.y.dtype, (first_ + t) * n + column, n - column,
                         load(sums + t * stride + i));
  }

  const ExpertsArgs& args_;
  const ChooseFamily choose_;
  const int64_t first_, tokens_, pairs_;
  const Weights gate_up_, down_;
  const int64_t chunk_;
  WeightOrder order_{};
  float* factors_ = nullptr;
  RowRange* ranges_ = nullptr;
  RangeProduct *up_products_ = nullptr, *down_products_ = nullptr;
  SharedRows shared_{};
  float* sums_ = nullptr;
};

inline void experts_by(const ExpertsArgs& args, ChooseFamily choose) {
  auto run = [&] {
    for (int64_t first = 0; first < args.tokens(); first += kBlockTokens)
      ExpertsBlock(args, choose, first, smaller(kBlockTokens, args.tokens() - first)).run();
  };
  threads_for_products(args.index.numel(), args.gate_up.spec) > 1 ? as_team(run) : run();
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
