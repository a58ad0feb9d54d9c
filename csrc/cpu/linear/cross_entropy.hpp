// SPDX-License-Identifier: Apache-2.0
// The loop of the op linear_cross_entropy. Neither logits nor probabilities are ever [T, V]; a task has a block of rows
// and a chunk of the vocabulary (head_chunk.hpp) at a time.
//
//   rows      tasks (block of rows, range of the vocabulary), chunk by chunk: logits, their largest and the sum of
//             exp(s - base), as in attention; with them the gradient of x, which is attention's sum too, with the head
//             in the place of the values: out = sum over v of exp(s - base) * head[v]. So one pass is enough.
//   finish    the ranges of a row together: its loss, and the gradient of x
//   columns   if the head or the bias wants a gradient: tasks are chunks. Logits are computed again, now with known
//             sums, and dlogits^T x is added up over the rows, block by block
//
// Which blocks and ranges there are depends on shapes alone, and each sum has one order: the same bits for any number of
// threads.
#pragma once

#include <tuple>
#include <utility>

#include "cpu/linear/head_chunk.hpp"
#include "cpu/linear/label_rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kLossRows = 256;          // rows of a block, for which a chunk of the head is decoded once
constexpr int64_t kLossTasks = 32;          // wanted for a pass, if the vocabulary is large enough
constexpr int64_t kLossSums = 24ll << 20;   // bytes of the sums of a pass
constexpr float kNoBase = -__builtin_inff();

// What is known of a row over a part of the vocabulary.
struct RowStatistics {
  double sum = 0, all = 0;  // of exp(s - base), of s
  float base = kNoBase;     // the largest s
  float label = 0;          // s of the label, if it is in this part
};

// What the gradients of a row need: dlogit[v] = slope * (probability * exp(s - base) - smooth - onehot)
struct RowEnd {
  float base, probability, smooth, onehot;
};

// The values s of logits, and ds / dlogit without the scale.
struct Capped {
  f32x16 scale, cap, inverse;
  bool caps;
  explicit Capped(const LinearCrossEntropyArgs& args)
      : scale(set1(args.scale)), cap(set1(args.softcap)), inverse(set1(args.softcap ? 1.0f / args.softcap : 0.0f)),
        caps(args.softcap != 0.0f) {}
  LOWBIT_INLINE f32x16 value(f32x16 logit) const {
    const f32x16 scaled = mul(logit, scale);
    return caps ? mul(cap, tanh(mul(scaled, inverse))) : scaled;
  }
  LOWBIT_INLINE f32x16 slope(f32x16 s) const {
    const f32x16 part = mul(s, inverse);
    return sub(set1(1.0f), mul(part, part));  // 1 without a cap, as inverse is 0
  }
};

// The sums of a task: [rows, padded k] each.
struct GradientSums {
  Matrix<float> soft;   // of slope * exp(s - base) * head[v]
  Matrix<float> known;  // of what does not wait for the sum: labels and smoothing
};

class LossPass {
 public:
  LossPass(const LinearCrossEntropyArgs& args, ChooseFamily choose, const int32_t* rows, int64_t count, RowEnd* ends)
      : args_(args), choose_(choose), rows_(rows), count_(count), ends_(ends),
        blocks_(count, kLossRows), panels_(product_spec(args).panels()), ranges_(ranges(args, blocks_.count, count)) {}

  // Rows of a pass, whose sums fit into kLossSums.
  static int64_t most_rows(const LinearCrossEntropyArgs& args) {
    return larger(kLossRows, kLossSums / bytes_of_row(args) / kLossRows * kLossRows);
  }

  void run(int threads) {
    TileArena counted;
    take(counted);
    const Scratch memory(counted.bytes);
    TileArena arena{memory.arena()};
    take(arena);
    parallel_for(blocks_.count * ranges_.count, threads, [&](int64_t task) {
      const Span rows{blocks_.begin(task / ranges_.count), blocks_.begin(task / ranges_.count + 1)};
      add_range(rows, task % ranges_.count);
    });
    parallel_for(blocks_.count, threads, [&](int64_t block) {
      for (int64_t row = blocks_.begin(block); row < blocks_.begin(block + 1); row++) finish(row);
    });
  }

 private:
  static int64_t bytes_of_row(const LinearCrossEntropyArgs& args) {
    const int64_t sums = args.of_x ? 2 * row_stride(args.spec.padded_k()) * static_cast<int64_t>(sizeof(float)) : 0;
    return sums + static_cast<int64_t>(sizeof(RowStatistics));
  }
  static RowTiles ranges(const LinearCrossEntropyArgs& args, int64_t blocks, int64_t count) {
    const int64_t chunks = ceil_div(args.spec.panels(), kChunkPanels),
                  wanted = smaller(ceil_div(kLossTasks, blocks), kLossSums / (count * bytes_of_row(args))),
                  parts = larger(1, smaller(wanted, chunks));
    return {chunks, ceil_div(chunks, parts)};
  }

  void take(TileArena& arena) {
    statistics_ = arena.array<RowStatistics>(ranges_.count * count_);
    if (!args_.of_x) return;
    sums_ = {arena.matrix<float>(ranges_.count * count_, args_.spec.padded_k()),
             arena.matrix<float>(ranges_.count * count_, args_.spec.padded_k())};
  }
  RowStatistics& statistics(int64_t row, int64_t range) { return statistics_[range * count_ + row]; }
  GradientSums sums(int64_t row, int64_t range) const {
    return {sums_.soft.from(range * count_ + row), sums_.known.from(range * count_ + row)};
  }
  int64_t label(int64_t row) const { return args_.labels.as<const int64_t>()[rows_[row]]; }

  // A block of rows over a range of the vocabulary.
  void add_range(Span rows, int64_t range) {
    const Family& family = choose_(product_spec(args_), args_.x_format, args_.x.dtype, rows.count());
    const LossRows x(args_, family, rows_ + rows.begin, rows.count());
    const bool smooths = args_.of_x && args_.smoothing != 0.0f;
    TileArena counted;
    const auto take_chunk = [&](TileArena& arena) {
      HeadChunk chunk(args_, args_.of_x, arena);
      const Matrix<float> s{arena.array<float>(rows.count() * kChunk), kChunk},
          slopes{arena.array<float>(smooths ? rows.count() * kChunk : 0), kChunk};
      return std::tuple(chunk, s, slopes);
    };
    take_chunk(counted);
    const Scratch memory(counted.bytes);
    TileArena arena{memory.arena()};
    auto [chunk, s, slopes] = take_chunk(arena);
    for (int64_t row = rows.begin; row < rows.end; row++) statistics(row, range) = {};
    const GradientSums sums = this->sums(rows.begin, range);
    if (args_.of_x) clear_rows(sums.soft, rows.count()), clear_rows(sums.known, rows.count());
    for (int64_t number = ranges_.begin(range); number < ranges_.begin(range + 1); number++) {
      chunk.read(piece_of(panels_, kChunkPanels, number));
      x.multiply(chunk, s.data);
      for (int64_t r = 0; r < rows.count(); r++)
        add_logits(chunk, rows.begin + r, range, s.row(r), smooths ? slopes.row(r) : nullptr);
      if (!args_.of_x) continue;
      const ProductSize size{rows.count(), args_.spec.padded_k(), chunk.columns()};
      multiply(s, chunk.rows(), sums.soft, size, {.sum = Sum::onto});
      if (smooths) multiply(slopes, chunk.rows(), sums.known, size, {.sum = Sum::onto});
    }
  }

  // Logits -> slope * exp(s - base), for one row and chunk; slopes: -smoothing / V * slope, or null.
  void add_logits(const HeadChunk& chunk, int64_t row, int64_t range, float* s, float* slopes) {
    const Capped capped(args_);
    RowStatistics& of_row = statistics(row, range);
    const int64_t columns = chunk.columns(), at = label(row) - chunk.first();
    f32x16 top = set1(kNoBase);
    double all = 0;
    for (int64_t c = 0; c < columns; c += 16) {
      const f32x16 value = capped.value(load_as_float(s, DType::float32, c, columns - c));
      store(s + c, value);
      for (int64_t lane = columns; lane < c + 16; lane++) s[lane] = kNoBase;  // no columns of the head
      top = max(top, load(s + c));
      if (args_.smoothing != 0.0f) all += total(load_as_float(s, DType::float32, c, columns - c));
    }
    of_row.all += all;
    if (at >= 0 && at < columns) add_label(chunk, row, range, s[at], at);
    if (const float highest = largest(top); highest > of_row.base) raise_base(row, range, highest);
    const f32x16 base = set1(of_row.base == kNoBase ? 0.0f : of_row.base),
                 smooth = set1(-args_.smoothing / static_cast<float>(args_.spec.n));
    f32x16 sums = set1(0.0f);
    for (int64_t c = 0; c < columns; c += 16) {
      const f32x16 value = load(s + c), p = exp(sub(value, base));
      sums = add(sums, p);
      if (!args_.of_x) continue;
      const f32x16 slope = capped.caps ? capped.slope(value) : set1(1.0f);
      store(s + c, mul(p, slope));
      if (slopes) store(slopes + c, mul(smooth, slope));
    }
    of_row.sum += total(sums);
  }

  void add_label(const HeadChunk& chunk, int64_t row, int64_t range, float s, int64_t at) {
    statistics(row, range).label = s;
    if (!args_.of_x) return;
    const float slope = args_.softcap ? 1.0f - (s / args_.softcap) * (s / args_.softcap) : 1.0f;
    const f32x16 factor = set1(-(1.0f - args_.smoothing) * slope);
    float* const known = sums(row, range).known.data;
    const float* const of_label = chunk.rows().row(at);
    for (int64_t i = 0; i < args_.spec.padded_k(); i += 16)
      store(known + i, fma(factor, load(of_label + i), load(known + i)));
  }

  // The sums of a row are relative to its base.
  void raise_base(int64_t row, int64_t range, float highest) {
    RowStatistics& of_row = statistics(row, range);
    const double factor = of_row.base == kNoBase ? 0.0 : __builtin_exp(static_cast<double>(of_row.base) - highest);
    of_row.base = highest, of_row.sum *= factor;
    if (!args_.of_x || factor == 0.0) return;
    float* const soft = sums(row, range).soft.data;
    const f32x16 times = set1(static_cast<float>(factor));
    for (int64_t i = 0; i < args_.spec.padded_k(); i += 16) store(soft + i, mul(load(soft + i), times));
  }

  void finish(int64_t row) {
    RowStatistics whole;
    for (int64_t range = 0; range < ranges_.count; range++)
      if (statistics(row, range).base > whole.base) whole.base = statistics(row, range).base;
    for (int64_t range = 0; range < ranges_.count; range++) {
      const RowStatistics& part = statistics(row, range);
      whole.sum += part.sum * weight_of(part, whole.base), whole.all += part.all, whole.label += part.label;
    }
    const int64_t t = rows_[row];
    const double smoothing = args_.smoothing, n = static_cast<double>(args_.spec.n), z = args_.z_loss,
                 lse = whole.base + __builtin_log(whole.sum);
    args_.lse.as<float>()[t] = static_cast<float>(lse);
    args_.loss.as<float>()[t] = static_cast<float>((1 - smoothing) * (lse - whole.label) +
                                                   smoothing * (lse - whole.all / n) + z * lse * lse);
    if (!args_.row_weight) return;
    const double weight = static_cast<double>(args_.row_weight.as<const float>()[t]) * args_.scale;
    ends_[row] = {whole.base, static_cast<float>(weight * (1 + 2 * z * lse) / whole.sum),
                  static_cast<float>(weight * smoothing / n), static_cast<float>(weight * (1 - smoothing))};
    if (args_.of_x) store_gradient(row, static_cast<float>(weight), t);
  }

  static double weight_of(const RowStatistics& part, float base) {
    return part.base == base ? 1.0 : __builtin_exp(static_cast<double>(part.base) - base);
  }

  // t: the row of x.
  void store_gradient(int64_t row, float weight, int64_t t) {
    const RowEnd& end = ends_[row];
    const int64_t k = args_.spec.k;
    for (int64_t i = 0; i < k; i += 16) {
      f32x16 soft = set1(0.0f), known = set1(0.0f);
      for (int64_t range = 0; range < ranges_.count; range++) {
        const GradientSums of = sums(row, range);
        const auto part = static_cast<float>(weight_of(statistics(row, range), end.base));
        if (part != 0.0f) soft = fma(set1(part), load(of.soft.data + i), soft);
        known = add(known, load(of.known.data + i));
      }
      store_from_float(args_.grad_x.data, args_.grad_x.dtype, t * k + i, k - i,
                       fma(set1(end.probability), soft, mul(set1(weight), known)));
    }
  }

  const LinearCrossEntropyArgs& args_;
  const ChooseFamily choose_;
  const int32_t* const rows_;  // rows of x
  const int64_t count_;
  RowEnd* const ends_;
  const RowTiles blocks_;
  const int64_t panels_;
  const RowTiles ranges_;  // of chunks
  RowStatistics* statistics_ = nullptr;  // [ranges][rows]
  GradientSums sums_{};                  // likewise
};

// The gradients of the head and of the bias for one chunk of columns.
class HeadGradient {
 public:
  HeadGradient(const LinearCrossEntropyArgs& args, ChooseFamily choose, const int32_t* rows, int64_t count,
               const RowEnd* ends)
      : args_(args), choose_(choose), rows_(rows), ends_(ends), blocks_(count, kLossRows) {}

  void add_up(Span panels) const {
    TileArena counted;
    Memory{args_, counted};
    const Scratch scratch(counted.bytes);
    TileArena arena{scratch.arena()};
    Memory memory{args_, arena};
    memory.chunk.read(panels);
    if (args_.of_head) clear_rows(memory.head, kChunk);
    for (int64_t c = 0; c < kChunk; c += 16) store(memory.bias + c, set1(0.0f));
    for (int64_t block = 0; block < blocks_.count; block++)
      add_rows(memory, {blocks_.begin(block), blocks_.begin(block + 1)});
    const int64_t k = args_.spec.k, first = memory.chunk.first(), columns = memory.chunk.columns();
    for (int64_t c = 0; args_.of_head && c < columns; c++)
      for (int64_t i = 0; i < k; i += 16)
        store_from_float(args_.grad_head.data, args_.grad_head.dtype, (first + c) * k + i, k - i,
                         load(memory.head.row(c) + i));
    for (int64_t c = 0; args_.of_bias && c < columns; c += 16)
      store_from_float(args_.grad_bias.data, args_.grad_bias.dtype, first + c, columns - c, load(memory.bias + c));
  }

 private:
  struct Memory {
    HeadChunk chunk;
    Matrix<float> logits, x, head;
    float* bias;
    Memory(const LinearCrossEntropyArgs& args, TileArena& arena)
        : chunk(args, false, arena), logits{arena.array<float>(kLossRows * kChunk), kChunk},
          x(arena.matrix<float>(args.of_head ? kLossRows : 0, args.spec.padded_k())),
          head(arena.matrix<float>(args.of_head ? kChunk : 0, args.spec.padded_k())),
          bias(arena.array<float>(kChunk)) {}
  };

  void add_rows(Memory& memory, Span rows) const {
    const Family& family = choose_(product_spec(args_), args_.x_format, args_.x.dtype, rows.count());
    LossRows(args_, family, rows_ + rows.begin, rows.count()).multiply(memory.chunk, memory.logits.data);
    const int64_t k = args_.spec.k, padded = args_.spec.padded_k(), columns = memory.chunk.columns();
    for (int64_t r = 0; r < rows.count(); r++) {
      float* const gradient = memory.logits.row(r);
      differentiate(memory.chunk, rows.begin + r, gradient);
      for (int64_t c = 0; c < columns; c += 16) store(memory.bias + c, add(load(memory.bias + c), load(gradient + c)));
      for (int64_t i = 0; args_.of_head && i < padded; i += 16)
        store(memory.x.row(r) + i,
              i < k ? load_as_float(args_.x.data, args_.x.dtype, rows_[rows.begin + r] * k + i, k - i) : set1(0.0f));
    }
    if (args_.of_head)
      multiply(transposed(memory.logits), memory.x, memory.head, {columns, padded, rows.count()}, {.sum = Sum::onto});
  }

  // The logits of a row -> their gradients, zero behind the last column.
  void differentiate(const HeadChunk& chunk, int64_t row, float* logits) const {
    const RowEnd& end = ends_[row];
    const Capped capped(args_);
    const int64_t columns = chunk.columns(),
                  at = args_.labels.as<const int64_t>()[rows_[row]] - chunk.first();
    const f32x16 base = set1(end.base), probability = set1(end.probability), smooth = set1(end.smooth);
    for (int64_t c = 0; c < columns; c += 16) {
      const f32x16 s = capped.value(load_as_float(logits, DType::float32, c, columns - c)),
                   slope = capped.caps ? capped.slope(s) : set1(1.0f),
                   soft = sub(mul(probability, exp(sub(s, base))), smooth);
      const int64_t of_label = at - c;
      store(logits + c, mul(soft, slope));
      if (of_label >= 0 && of_label < 16) {
        alignas(64) float slopes[16];
        store(slopes, slope);
        logits[at] -= end.onehot * slopes[of_label];
      }
      for (int64_t lane = columns; lane < c + 16; lane++) logits[lane] = 0.0f;
    }
  }

  const LinearCrossEntropyArgs& args_;
  const ChooseFamily choose_;
  const int32_t* const rows_;
  const RowEnd* const ends_;
  const RowTiles blocks_;
};

inline void zero(const TensorView& tensor) {
  if (tensor.numel() > 0) std::memset(tensor.data, 0, tensor.numel() * size_of(tensor.dtype));
}

inline void cross_entropy_by(const LinearCrossEntropyArgs& args, ChooseFamily choose) {
  const auto lists = [&](Arena& arena) {
    return std::pair(arena.array<int32_t>(args.rows()), arena.array<RowEnd>(args.rows()));
  };
  Arena counted;
  lists(counted);
  const Scratch memory(counted.bytes);
  Arena arena = memory.arena();
  const auto found = lists(arena);  // clang 15 captures no structured bindings
  int32_t* const rows = found.first;
  RowEnd* const ends = found.second;
  const int64_t count = find_label_rows(args, rows);
  zero(args.loss), zero(args.lse), zero(args.grad_x);  // rows without a label keep these
  if (count == 0) return zero(args.grad_head), zero(args.grad_bias);
  const int threads = threads_for_products(count, args.spec);
  as_team([&] {
    const int64_t most = LossPass::most_rows(args);
    for (int64_t first = 0; first < count; first += most)
      LossPass(args, choose, rows + first, smaller(most, count - first), ends + first).run(threads);
    if (!args.of_head && !args.of_bias) return;
    const HeadGradient gradient(args, choose, rows, count, ends);
    const int64_t panels = args.spec.panels();
    parallel_for(ceil_div(panels, kChunkPanels), threads,
                 [&](int64_t task) { gradient.add_up(piece_of(panels, kChunkPanels, task)); });
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
