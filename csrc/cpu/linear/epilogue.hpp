// SPDX-License-Identifier: Apache-2.0
// The epilogue, on 16 accumulators before they are stored: column scale, offset of asymmetric activations, bias, an
// adapter, activation, mul, add, rounding; or, after the bias, an addition: y += factor of the row * value.
#pragma once

#include "core/one_function.hpp"
#include "cpu/linear/product.hpp"
#include "cpu/simd/math.hpp"
#include "cpu/vector_io.hpp"
#include "ops/linear.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The destination of a product: row r goes to row index[r] of y, or without an index to row first + r.
struct Sink {
  void* y;                        // rows of n columns, or of a part of them, from `column` on
  DType dtype;                    // dtype of y, mul and add
  int64_t stride;                 // row stride of these three: n, or less in scratch memory
  const void* bias = nullptr;     // [n] or null
  DType bias_dtype = DType::float32;
  Activation activation = Activation::none;
  const void *mul = nullptr, *add = nullptr;  // [..., n] or null
  int64_t first = 0;
  const int32_t* index = nullptr;
  int64_t column = 0;             // first column that y has
  const float* factor = nullptr;  // per row r: y += factor * value in float32, in the order of the calls; or null
  const LowRank* low_rank = nullptr;  // an adapter, or null

  LOWBIT_INLINE int64_t row(int64_t r) const { return index ? index[r] : first + r; }
  // Fetches what 16 columns of a row are stored to and computed with; size: size_of(dtype).
  LOWBIT_INLINE void prefetch(int64_t r, int64_t panel, int64_t size) const {
    const int64_t at = (row(r) * stride + panel * kPanelColumns - column) * size;
    __builtin_prefetch(static_cast<const char*>(y) + at, 1);
    if (mul) __builtin_prefetch(static_cast<const char*>(mul) + at);
    if (add) __builtin_prefetch(static_cast<const char*>(add) + at);
  }
  LOWBIT_INLINE Sink from(int64_t r) const {
    Sink rest = *this;
    if (index) rest.index += r;
    else rest.first += r;
    if (factor) rest.factor += r;
    return rest;
  }
};

// The part of `finish_row` that is the same for all rows of a panel.
struct PanelEnd {
  f32x16 scale, sum, bias;  // sum: of a column's weights
  bool scales;
  int64_t inner = -1;       // the first column of the adapter's inner; -1: nothing is added
  LOWBIT_INLINE PanelEnd() = default;
  LOWBIT_INLINE PanelEnd(const PackedWeight& weight, const Sink& sink, int64_t panel, bool offsets) {
    const WeightSpec& spec = weight.spec;
    const uint8_t* header = weight.data + panel * spec.panel_bytes();
    scales = !is_float(spec.format);
    if (scales) scale = load(reinterpret_cast<const float*>(header + spec.column_scale_at()));
    if (offsets) sum = load(reinterpret_cast<const float*>(header + spec.column_sum_at()));
    const int64_t column = panel * kPanelColumns;
    if (sink.bias) bias = load_as_float(sink.bias, sink.bias_dtype, column, spec.n - column);
    if (sink.low_rank) {
      const LowRank::Part* part = sink.low_rank->parts;
      while (part->end <= column) part++;
      inner = part->column;
    }
  }
};

// Adds an adapter's part to 16 columns of a row of y. inner: a column of this row, from which `rank` are read.
// Four sums, because an FMA has a latency of 4 cycles.
[[gnu::noinline]] inline void add_low_rank(const LowRank& low, DType dtype, int64_t row, int64_t inner, int64_t panel,
                                           f32x16& value) {
  constexpr int64_t kChains = 4;
  alignas(64) float factors[kPanelColumns];
  f32x16 sums[kChains] = {value, set1(0.0f), set1(0.0f), set1(0.0f)};
  const int64_t at = row * low.width + inner, up = panel * low.rank * kPanelColumns;
  for (int64_t first = 0; first < low.rank; first += kPanelColumns) {
    const int64_t count = smaller(low.rank - first, kPanelColumns);
    store(factors, load_as_float(low.inner, dtype, at + first, count));  // 0 behind the last one
    const auto add_all = [&](auto load_up) {
      for (int64_t r = 0; r < count; r += kChains)
        unroll<kChains>([&](auto chain) {
          if (r + chain < count)
            sums[chain] = fma(set1(factors[r + chain]), load_up(up + (first + r + chain) * kPanelColumns), sums[chain]);
        });
    };
    if (low.up_dtype == DType::float32)
      add_all([&](int64_t i) { return load(static_cast<const float*>(low.up) + i); });
    else if (low.up_dtype == DType::bfloat16)
      add_all([&](int64_t i) { return load_bf16(static_cast<const uint16_t*>(low.up) + i); });
    else
      add_all([&](int64_t i) { return load_f16(static_cast<const uint16_t*>(low.up) + i); });
  }
  value = add(add(sums[0], sums[1]), add(sums[2], sums[3]));
}

// n: columns of y. offset: the factor of the columns' sums, or null.
LOWBIT_INLINE void finish_row(const Sink& sink, int64_t n, const PanelEnd& end, int64_t row, int64_t panel,
                              f32x16 value, const float* offset) {
  const int64_t column = panel * kPanelColumns, count = n - column,
                at = sink.row(row) * sink.stride + column - sink.column;
  if (end.scales) {
    value = mul(value, end.scale);
    if (offset) value = fma(set1(offset[row]), end.sum, value);
  }
  if (sink.bias) value = add(value, end.bias);
  if (end.inner >= 0) add_low_rank(*sink.low_rank, sink.dtype, sink.row(row), end.inner, panel, value);
  switch (sink.activation) {
    case Activation::none: break;
    case Activation::relu: value = relu(value); break;
    case Activation::gelu: value = gelu(value); break;
    case Activation::gelu_tanh: value = gelu_tanh(value); break;
    case Activation::silu: value = silu(value); break;
  }
  if (sink.mul) value = mul(value, load_as_float(sink.mul, sink.dtype, at, count));
  if (sink.add) value = add(value, load_as_float(sink.add, sink.dtype, at, count));
  if (sink.factor) value = fma(set1(sink.factor[row]), value, load_as_float(sink.y, sink.dtype, at, count));
  store_from_float(sink.y, sink.dtype, at, count, value);
}

// `count` rows of a panel of n columns in all: row r has the 16 sums from sums[r * step] on, and is row r of sink.
// row_factor: times a factor for each row; those with factor 0 are skipped; or null. row_offset: the factor of
// column_sum (asymmetric activations), or null. Not inlined: it runs once per 16 k products, and as part of each tile
// size it was two thirds of the code.
LOWBIT_ONE_FUNCTION [[maybe_unused]] inline void finish_rows(const Sink& sink, int64_t n, const PanelEnd& end,
                                                             int64_t count, int64_t panel, const float* sums,
                                                             int64_t step, const float* row_factor,
                                                             const float* row_offset) {
  // Rows of whole panels as a prompt through a decoder has them: where these are constants, a row takes a third of the
  // instructions. With k = 512 all rows had taken as long as a sixth of the products (W8A8, Zen 5).
  const auto finish = [&](DType dtype, Activation activation) __attribute__((always_inline)) {
    Sink known = sink;
    known.dtype = dtype, known.activation = activation, known.factor = nullptr;
    PanelEnd ends = end;
    ends.inner = -1;
    for (int64_t r = 0; r < count; r++)
      finish_row(known, (panel + 1) * kPanelColumns, ends, r, panel, load(sums + r * step), nullptr);
  };
  const auto finish_as = [&](DType dtype) __attribute__((always_inline)) {
    if (sink.activation == Activation::silu) finish(dtype, Activation::silu);
    else finish(dtype, Activation::none);
  };
  const bool known = sink.activation == Activation::none || sink.activation == Activation::silu;
  if (known && (panel + 1) * kPanelColumns <= n && end.inner < 0 && !sink.factor && !row_factor && !row_offset) {
    if (sink.dtype == DType::float32) return finish_as(DType::float32);
    if (sink.dtype == DType::bfloat16) return finish_as(DType::bfloat16);
    return finish_as(DType::float16);
  }
  for (int64_t r = 0; r < count; r++, sums += step) {
    f32x16 value = load(sums);
    if (row_factor) {
      if (row_factor[r] == 0.0f) continue;
      value = mul(value, set1(row_factor[r]));
    }
    finish_row(sink, n, end, r, panel, value, row_offset);
  }
}

LOWBIT_INLINE void finish_rows(const PackedWeight& weight, const Sink& sink, int64_t count, int64_t panel,
                               const float* sums, int64_t step, const float* row_factor, const float* row_offset) {
  finish_rows(sink, weight.spec.n, PanelEnd(weight, sink, panel, row_offset != nullptr), count, panel, sums, step,
              row_factor, row_offset);
}

// The same for the rows of a tile from `row` on, whose sums are `step` vectors apart.
LOWBIT_INLINE void finish_tile(const PackedWeight& weight, const Sink& sink, int64_t row, int64_t count, int64_t panel,
                               const f32x16* sums, int64_t step, const float* row_offset) {
  finish_rows(weight, sink.from(row), count, panel, reinterpret_cast<const float*>(sums), step * kPanelColumns, nullptr,
              row_offset);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
