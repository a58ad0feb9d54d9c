// SPDX-License-Identifier: Apache-2.0
// Families of product.hpp as run-time values, for loops over rows with one of many weights each. Rows are sorted by
// weight (weight_order.hpp), so that each weight is read once for all of its rows:
//
//   order    rows of weight 0 | rows of weight 3 | ...      rows of a weight stay in order
//   ranges   rows of one weight, at most kPass of its family
//   passes   ranges of about as many rows as there is scratch memory for
#pragma once

#include <cstring>
#include <type_traits>

#include "core/tensor_view.hpp"
#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A family as a value, so that a loop is compiled once for all families. `rows`: storage of a Rows.
struct Family {
  int64_t pass;  // max rows of a Rows
  PanelCut cut;
  void (*make)(void* rows, const XView& x, const WeightSpec& spec, int64_t count, Arena& arena);
  void (*find)(void* rows, const void* all, const int32_t* index, int64_t count);  // null if not supported
  int64_t (*pieces)(const void* rows);
  void (*prepare)(const void* rows, const WeightSpec& spec, int64_t piece);
  RowBlocks (*blocks)(const void* rows, const WeightSpec& spec);
  void (*multiply)(const void* rows, const PackedWeight& weight, const Sink& sink, Span block, Span panels);
};

constexpr int64_t kRowsBytes = 160;  // size of any family's Rows

template <class Rows>
void find_rows(void* rows, const void* all, const int32_t* index, int64_t count) {
  const Rows found(*static_cast<const Rows*>(all), index, count);
  std::memcpy(rows, &found, sizeof found);
}
template <class Rows>
constexpr auto find_of() -> decltype(Family::find) {
  if constexpr (std::is_constructible_v<Rows, const Rows&, const int32_t*, int64_t>) return find_rows<Rows>;
  else return nullptr;
}

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
    .find = find_of<Rows>(),
    .pieces = [](const void* rows) { return static_cast<const Rows*>(rows)->pieces(); },
    .prepare = [](const void* rows, const WeightSpec& spec,
                  int64_t piece) { static_cast<const Rows*>(rows)->prepare(spec, piece); },
    .blocks = [](const void* rows, const WeightSpec& spec) { return static_cast<const Rows*>(rows)->blocks(spec); },
    .multiply = [](const void* rows, const PackedWeight& weight, const Sink& sink, Span block,
                   Span panels) { static_cast<const Rows*>(rows)->multiply(weight, sink, block, panels); }};

// Chooses the family for that many rows of one weight.
using ChooseFamily = const Family& (*)(const WeightSpec& spec, XFormat x_format, DType x_dtype, int64_t rows);

// The packed weights, all of one shape.
struct Weights {
  WeightSpec spec;
  const TensorView& packed;  // [E, panels, panel_bytes]
  const TensorView& bias;    // [E, n] or none

  const uint8_t* panel(int64_t e, int64_t panel) const {
    return packed.as<const uint8_t>() + (e * spec.panels() + panel) * spec.panel_bytes();
  }
  PackedWeight weight(int64_t e, const uint8_t* next) const { return {spec, panel(e, 0), next}; }
  // Where sums of weight e go, with its bias.
  Sink sink(int64_t e, void* y, DType dtype, int64_t stride) const {
    const int64_t bytes = bias ? spec.n * static_cast<int64_t>(size_of(bias.dtype)) : 0;
    return {.y = y, .dtype = dtype, .stride = stride, .bias = bias ? bias.as<const char>() + e * bytes : nullptr,
            .bias_dtype = bias.dtype};
  }
};

// Rows first .. first + count of the order.
struct RowRange {
  int64_t weight, first, count;
};

// Rows shared by ranges: those of a family that finds them by index, prepared once.
struct SharedRows {
  const Family* family = nullptr;  // null: none
  const int32_t* index = nullptr;  // index of each ordered row
  alignas(8) char rows[kRowsBytes] = {};
};

// A block of rows of range r times a part of its panels, or of other columns.
struct RangeTask {
  int64_t r;
  Span block, part;
};

// One product of a range. pieces, tasks: the number of them in this range and those before it in its pass.
struct RangeProduct {
  const Family* family;
  int64_t chunk, pieces, tasks;
  alignas(8) char rows[kRowsBytes];
};

// One product of all ranges of a pass.
class PassProduct {
 public:
  PassProduct(const WeightSpec& spec, const RowRange* ranges, RangeProduct* products, int64_t count,
              const SharedRows* shared = nullptr)
      : spec_(spec), ranges_(ranges), products_(products), count_(count), shared_(shared) {
    for (int64_t r = 0; r < count; r++) rows_ += ranges[r].count;
  }

  int64_t count() const { return count_; }
  int64_t rows() const { return rows_; }
  const RowRange& range(int64_t r) const { return ranges_[r]; }
  int threads() const { return threads_for_products(rows_, spec_); }

  // Allocates the memory of all rows; row 0 of x is the ordered row `first`.
  void make(const XView& x, int64_t first, Arena& arena) const {
    for (int64_t r = 0; r < count_; r++) {
      RangeProduct& product = products_[r];
      const RowRange& range = ranges_[r];
      if (finds(r)) product.family->find(product.rows, shared_->rows, shared_->index + range.first, range.count);
      else product.family->make(product.rows, x.from(range.first - first), spec_, range.count, arena);
    }
  }

  void prepare() const {
    int64_t pieces = 0;
    for (int64_t r = 0; r < count_; r++)
      products_[r].pieces = pieces += finds(r) ? 0 : products_[r].family->pieces(products_[r].rows);
    parallel_for(pieces, threads_for(rows_ * spec_.padded_k()), [&](int64_t piece) {
      const int64_t r = find(&RangeProduct::pieces, piece);
      products_[r].family->prepare(products_[r].rows, spec_, piece - (r ? products_[r - 1].pieces : 0));
    });
  }

  // body(task, next) for all ranges, blocks of their rows and parts of `width`, in panels: tasks of like work, so that
  // ranges of many rows are cut into more of them. next: the task that the thread takes then, if no other takes it.
  template <class Body>
  void for_tasks(int64_t width, Body&& body) const {
    const int threads = this->threads();
    int64_t tasks = 0;
    for (int64_t r = 0; r < count_; r++) {
      RangeProduct& product = products_[r];
      product.chunk = product.family->cut.chunk(width * rows_ / ranges_[r].count, threads);
      product.tasks = tasks += blocks(r).count * ceil_div(width, product.chunk);
    }
    parallel_for(tasks, threads, [&](int64_t number) {
      body(task(width, number), task(width, smaller(number + 1, tasks - 1)));
    });
  }

  RowBlocks blocks(int64_t r) const { return products_[r].family->blocks(products_[r].rows, spec_); }
  void multiply(int64_t r, const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    products_[r].family->multiply(products_[r].rows, weight, sink, block, panels);
  }

 private:
  bool finds(int64_t r) const { return shared_ && shared_->family == products_[r].family; }

  RangeTask task(int64_t width, int64_t number) const {
    const int64_t r = find(&RangeProduct::tasks, number), at = number - (r ? products_[r - 1].tasks : 0),
                  chunk = products_[r].chunk, chunks = ceil_div(width, chunk);
    return {r, blocks(r).at(at / chunks), piece_of(width, chunk, at % chunks)};
  }

  // The range that has this piece or task.
  int64_t find(int64_t RangeProduct::* end, int64_t number) const {
    int64_t first = 0, last = count_ - 1;
    while (first < last) {
      const int64_t middle = (first + last) / 2;
      if (number < products_[middle].*end) last = middle;
      else first = middle + 1;
    }
    return first;
  }

  const WeightSpec& spec_;
  const RowRange* const ranges_;
  RangeProduct* const products_;
  const int64_t count_;
  const SharedRows* const shared_;
  int64_t rows_ = 0;
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
