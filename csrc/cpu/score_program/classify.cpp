// SPDX-License-Identifier: Apache-2.0
// Block classes by interval arithmetic: the program is evaluated on intervals (q in q0..q1, k in k0..k1) once per
// block; values of q or k alone once per row or column of blocks. Blocks that intervals leave undecided are evaluated
// exactly, by the best row of score_program.
#include "cpu/score_program/classify.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <utility>

#include "core/parallel.hpp"
#include "ops/score_program.hpp"

namespace lowbit {
namespace {

using namespace score;
using enum ErrorKind;

constexpr int64_t kDenseRows = 128, kDenseColumns = 128;  // scores per exact evaluation: 64 KiB
constexpr int64_t kMaxScan = 1 << 14;                     // max elements of a captured tensor scanned for an interval

struct Region {
  int64_t b, h, q0, q1, k0, k1;  // inclusive
};

template <class Op, std::size_t... at>
Interval interval_as(const Interval* in, std::index_sequence<at...>) {
  if constexpr (requires { Op::interval(in[at]...); }) return Op::interval(in[at]...);
  else return {};
}
using IntervalOf = Interval (*)(const Interval*);
template <class... Ops>
constexpr auto interval_functions(OpList<Ops...>) {
  return std::array<IntervalOf, sizeof...(Ops)>{
      [](const Interval* in) { return interval_as<Ops>(in, std::make_index_sequence<arity_of<Ops>()>{}); }...};
}
constexpr auto kIntervals = interval_functions(ScoreOps{});

double element(const TensorView& view, int64_t at) {
  switch (view.dtype) {
    case DType::float32: return static_cast<double>(view.as<const float>()[at]);
    case DType::float64: return view.as<const double>()[at];
    case DType::bfloat16: return static_cast<double>(float_from_bfloat16(view.as<const uint16_t>()[at]));
    case DType::float16: return static_cast<double>(float_from_float16(view.as<const uint16_t>()[at]));
    case DType::int32: return view.as<const int32_t>()[at];
    case DType::int64: return static_cast<double>(view.as<const int64_t>()[at]);
    default: return view.as<const uint8_t>()[at] != 0;
  }
}

// The smallest and largest element within the index intervals.
Interval scan(const TensorView& view, const Interval* index) {
  int64_t first[TensorView::kMaxRank], count[TensorView::kMaxRank], all = 1;
  for (int d = 0; d < view.rank; d++) {
    const double size = static_cast<double>(view.shape[d]), shift = index[d].high < 0 ? size : 0;
    if (!(index[d].low + shift >= 0 && index[d].high + shift < size)) return {};
    first[d] = static_cast<int64_t>(index[d].low + shift),
    count[d] = static_cast<int64_t>(index[d].high + shift) - first[d] + 1;
    all *= count[d];
    if (all > kMaxScan) return {};
  }
  Interval found{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  for (int64_t i = 0; i < all; i++) {
    int64_t rest = i, at = 0;
    for (int d = view.rank - 1; d >= 0; d--) at += (first[d] + rest % count[d]) * view.stride[d], rest /= count[d];
    const double value = element(view, at);
    if (value != value) return {};
    found = {std::min(found.low, value), std::max(found.high, value)};
  }
  return found;
}

class Classifier {
 public:
  explicit Classifier(const BlockClassesArgs& args)
      : place_(args.place), call_(*args.call), grid_(args.grid), nodes_(call_.program().graph.nodes),
        output_(call_.program().output), live_(nodes_.size()) {
    live_[output_] = true;
    for (int i = output_; i >= 0; i--)
      for (int j = 0; live_[i] && j < nodes_[i].operand_count; j++) live_[nodes_[i].operands[j]] = true;
  }

  int64_t run(uint8_t* classes) {
    const int64_t q_blocks = ceil_div(grid_.q_length, grid_.q_block),
                  kv_blocks = ceil_div(grid_.kv_length, grid_.kv_block);
    const int64_t count = static_cast<int64_t>(nodes_.size());
    for (int64_t bh = 0; bh < grid_.batch * grid_.heads; bh++) {
      const int64_t b = bh / grid_.heads, h = bh % grid_.heads;
      std::vector<Interval> columns(kv_blocks * count);
      for (int64_t j = 0; j < kv_blocks; j++)
        for (Rate rate : {Rate::head, Rate::column}) evaluate(region(b, h, 0, j), rate, columns.data() + j * count);
      parallel_for(q_blocks, num_threads(), [&](int64_t i) {
        std::vector<Interval> row(count), block(count);
        for (Rate rate : {Rate::head, Rate::row}) evaluate(region(b, h, i, 0), rate, row.data());
        for (int64_t j = 0; j < kv_blocks; j++) {
          const Region here = region(b, h, i, j);
          for (int64_t n = 0; n < count; n++)
            block[n] = nodes_[n].rate == Rate::column ? columns[j * count + n] : row[n];
          for (Rate rate : {Rate::diagonal, Rate::tile}) evaluate(here, rate, block.data());
          uint8_t found = class_of(block[output_]);
          if (found == kUndecided) found = search(here);
          const bool whole = (i + 1) * grid_.q_block <= grid_.q_length && (j + 1) * grid_.kv_block <= grid_.kv_length;
          classes[(bh * q_blocks + i) * kv_blocks + j] = found == 2 && !whole ? 1 : found;
        }
      });
    }
    return evaluated_.load();
  }

 private:
  static constexpr uint8_t kUndecided = 3;

  Region region(int64_t b, int64_t h, int64_t i, int64_t j) const {
    return {b, h, i * grid_.q_block, std::min((i + 1) * grid_.q_block, grid_.q_length) - 1, j * grid_.kv_block,
            std::min((j + 1) * grid_.kv_block, grid_.kv_length) - 1};
  }

  static uint8_t class_of(Interval mask) { return mask.low >= 1 ? 2 : mask.high <= 0 ? 0 : kUndecided; }

  // The values of one rate (head: constants too).
  void evaluate(const Region& at, Rate rate, Interval* values) const {
    for (int n = 0; n <= output_; n++) {
      const ScoreNode& node = nodes_[n];
      const bool here = node.rate == rate || (rate == Rate::head && node.rate == Rate::constant);
      if (live_[n] && here) values[n] = value_of(node, at, values);
    }
  }

  Interval value_of(const ScoreNode& node, const Region& at, const Interval* values) const {
    const auto between = [](int64_t low, int64_t high) {
      return Interval{static_cast<double>(low), static_cast<double>(high)};
    };
    switch (node.op) {
      case number_of<B>(): return between(at.b, at.b);
      case number_of<H>(): return between(at.h, at.h);
      case number_of<Q>(): return between(at.q0, at.q1);
      case number_of<K>(): return between(at.k0, at.k1);
      case number_of<KMinusQ>(): return between(at.k0 - at.q1, at.k1 - at.q0);
      case number_of<IntConst>(): case number_of<BoolConst>(): return between(node.immediate, node.immediate);
      case number_of<FloatConst>():
        return rounded(std::bit_cast<double>(node.immediate), std::bit_cast<double>(node.immediate));
      default: break;
    }
    std::array<Interval, kMaxOperands> in;
    for (int j = 0; j < node.operand_count; j++) in[j] = values[node.operands[j]];
    if (node.op == number_of<score::Gather>()) return scan(call_.captured()[node.immediate], in.data());
    const Interval result = kIntervals[node.op](in.data());
    if (node.type == 'f') return rounded(result.low, result.high);
    if (node.type == 'b') return {std::max(result.low, 0.0), std::min(result.high, 1.0)};
    return result.low >= INT32_MIN && result.high <= INT32_MAX ? result : Interval{};  // unbounded, as it may wrap
  }
  // The machine computes in float32; rounding is monotone, so rounding the ends gives its interval.
  static Interval rounded(double low, double high) {
    return {static_cast<double>(static_cast<float>(low)), static_cast<double>(static_cast<float>(high))};
  }

  // Decides a block that intervals do not: part by part, until both a kept and a dropped score are found.
  uint8_t search(const Region& all) {
    evaluated_.fetch_add(1, std::memory_order_relaxed);
    bool kept = false, dropped = false;
    std::vector<Interval> values(nodes_.size());
    for (int64_t q0 = all.q0; q0 <= all.q1 && !(kept && dropped); q0 += kDenseRows)
      for (int64_t k0 = all.k0; k0 <= all.k1 && !(kept && dropped); k0 += kDenseColumns) {
        const Region piece{
            all.b, all.h, q0, std::min(q0 + kDenseRows - 1, all.q1), k0, std::min(k0 + kDenseColumns - 1, all.k1)};
        const bool whole = piece.q0 == all.q0 && piece.q1 == all.q1 && piece.k0 == all.k0 && piece.k1 == all.k1;
        for (int n = 0; !whole && n <= output_; n++)
          if (live_[n]) values[n] = value_of(nodes_[n], piece, values.data());
        const uint8_t found = whole ? kUndecided : class_of(values[output_]);
        if (found == kUndecided) look(piece, kept, dropped);
        else (found ? kept : dropped) = true;
      }
    return !kept ? 0 : dropped ? 1 : 2;
  }

  void look(const Region& at, bool& kept, bool& dropped) const {
    alignas(64) thread_local static float scores[kDenseRows * kDenseColumns];
    const int rows = static_cast<int>(at.q1 - at.q0 + 1), cols = static_cast<int>(at.k1 - at.k0 + 1);
    std::fill(scores, scores + rows * kDenseColumns, 0.0f);
    lowbit::run(ScoreProgramArgs{.place = place_,
                                 .call = &call_,
                                 .b = at.b,
                                 .h = at.h,
                                 .q0 = at.q0,
                                 .k0 = at.k0,
                                 .rows = rows,
                                 .cols = cols,
                                 .stride = kDenseColumns,
                                 .scores = scores});
    int64_t count = 0;
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++) count += scores[r * kDenseColumns + c] == 0.0f;
    kept |= count > 0, dropped |= count < static_cast<int64_t>(rows) * cols;
  }

  const Place& place_;
  const ScoreCall& call_;
  const BlockGrid& grid_;
  const std::vector<ScoreNode>& nodes_;
  int output_;
  std::vector<char> live_;
  std::atomic<int64_t> evaluated_{0};
};

}  // namespace

void cpu::classify_blocks(const BlockClassesArgs& args) {
  args.call->check_captured();
  *args.evaluated = Classifier(args).run(args.classes.as<uint8_t>());
  args.call->check_fault();
}

}  // namespace lowbit
