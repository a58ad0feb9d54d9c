// SPDX-License-Identifier: Apache-2.0
// Activations in the form that the kernels take: int8 codes with scales per (row, group), or floats in the order in
// which a register tile reads them.
#pragma once

#include "core/scratch.hpp"
#include "cpu/activation_codes.hpp"
#include "cpu/linear/epilogue.hpp"
#include "cpu/panel.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Row `row` of x as float32, as it enters the product or is rounded to int8, followed by zeros up to padded_k. Returns
// a pointer to x itself if no conversion is needed.
LOWBIT_INLINE const float* widen_row(const XView& x, int64_t row, int64_t padded_k, float* buffer) {
  const int64_t begin = x.begin(row);
  const bool rounded = x.format == XFormat::float8_row;
  if (x.dtype == DType::float32 && x.k == padded_k && !rounded) return static_cast<const float*>(x.x) + begin;
  for (int64_t i = 0; i < padded_k; i += 16) {
    const int64_t count = x.k - i;
    store(buffer + i, count > 0 ? load_as_float(x.x, x.dtype, begin + i, count) : set1(0.0f));
  }
  if (rounded) round_to_float8(buffer, padded_k);
  return buffer;
}

// The sum of x over a group of the weight, the factor of the zero point of an asymmetric weight.
LOWBIT_INLINE float group_sum(const WeightSpec& spec, const float* x, int64_t g) {
  const int64_t end = smaller(spec.padded_k(), (g + 1) * spec.group_k());
  f32x16 sums = set1(0.0f);
  for (int64_t i = g * spec.group_k(); i < end; i += 16) sums = add(sums, load(x + i));
  return sum(sums);
}

// A product of codes is at most 128 * 127 in magnitude (int4: 15 * 127), so an int32 accumulator holds floor((2^31 - 1)
// / (128 * 127)) = 132,104 of them whatever the codes are, and so does -128 * sum(q). A longer row without groups is
// accumulated in stretches of this many k, each scaled in float separately.
constexpr int64_t kExactK = 1 << 17;

// The sums of one row: one per group of the weight, or per stretch of a row without groups.
struct Sums {
  int64_t k, count;
  LOWBIT_INLINE explicit Sums(const WeightSpec& spec)
      : k(spec.group_size ? spec.group_size : smaller(spec.padded_k(), kExactK)), count(ceil_div(spec.k, k)) {}
};

// One sum of one row. It contributes w_scale * (scale * dot + zero + w_zero * minus_sum) to the product, dot = sum over
// its k of code * q. scale: of the activations, times the unit of the weight's integers. zero = -8 * scale * sum(q) for
// symmetric int4, else 0; minus_sum = -scale * sum(q) for asymmetric weights, else 0; start = -offset * sum(q) if codes
// are multiplied plus an offset, int8 as unsigned numbers and levels: so the int32 dot is exact for the signed code.
struct RowSum {
  float scale, zero, minus_sum;
  int32_t start;
};

template <class Step>
struct Int8Rows {
  Step* codes;       // [rows][code_stride]
  int64_t code_stride;
  RowSum* sums;      // [rows / tile][sum_count][tile]
  int64_t sum_count, tile;
  float* offset;     // [rows], for asymmetric activations, else null
  const int32_t* index = nullptr;  // position of each row in the arrays, for tiles of one row; null: in order

  LOWBIT_INLINE int64_t at(int64_t row) const { return index ? index[row] : row; }
  LOWBIT_INLINE const float* offsets_from(int64_t row) const { return offset ? offset + row : nullptr; }  // no index
};

template <class Dot, class Step>
LOWBIT_INLINE void quantize_row(const WeightSpec& spec, XFormat format, const float* x, const Int8Rows<Step>& rows,
                                int64_t row) {
  const int64_t padded = spec.padded_k(), sum_k = Sums(spec).k;
  const bool per_row = format != XFormat::int8_group || spec.group_size == 0;
  const bool asymmetric = format == XFormat::int8_row_asymmetric;
  Range range{};
  if (per_row) range = asymmetric ? asymmetric_range(x, padded) : symmetric_range(x, padded, 127.0f);
  if (asymmetric) rows.offset[row] = -range.scale * range.zero_point;
  int8_t* q = reinterpret_cast<int8_t*>(rows.codes + row * rows.code_stride);
  for (int64_t s = 0; s < rows.sum_count; s++) {
    const int64_t begin = s * sum_k, end = smaller(padded, begin + sum_k);
    if (!per_row) range = symmetric_range(x + begin, end - begin, 127.0f);
    const f32x16 inverse = set1(range.inverse), shift = set1(range.zero_point);
    i32x16 total = set1(int32_t{0});
    for (int64_t i = begin; i < end; i += 16) {
      const i32x16 code = int8_codes(load(x + i), inverse, shift);
      store_i8(q + i, code);
      total = add(total, code);
    }
    int32_t sum_q = sum(total);
    for (int64_t i = spec.k > begin ? spec.k : begin; asymmetric && i < end; i++)
      sum_q -= q[i], q[i] = 0;  // padding must contribute nothing, rather than x = 0
    const float scaled_sum = range.scale * static_cast<float>(sum_q);
    const bool int4 = spec.format == Format::int4;
    rows.sums[(row / rows.tile * rows.sum_count + s) * rows.tile + row % rows.tile] = {
        .scale = range.scale * integer_unit(spec.format),
        .zero = int4 && !spec.asymmetric ? -8.0f * scaled_sum : 0.0f,
        .minus_sum = spec.asymmetric ? -scaled_sum : 0.0f,
        .start = -Dot::kOffset * sum_q};
  }
  if constexpr (sizeof(Step) == 2) {  // widens in place, from the end: k 0, 2, 1, 3
    int16_t* wide = reinterpret_cast<int16_t*>(q);
    for (int64_t i = padded - 4; i >= 0; i -= 4) {
      const int16_t k0 = q[i], k1 = q[i + 1], k2 = q[i + 2], k3 = q[i + 3];
      wide[i] = k0, wide[i + 1] = k2, wide[i + 2] = k1, wide[i + 3] = k3;
    }
  }
}

// The stride of code rows is 64 bytes more than their length: a stride of 4096 would put them into one set of L1.
template <class Step>
LOWBIT_INLINE Int8Rows<Step> take_rows(const WeightSpec& spec, XFormat format, int64_t count, int64_t tile,
                                       Arena& arena) {
  const int64_t stride = spec.padded_k() + 64 / static_cast<int64_t>(sizeof(Step)), sums = Sums(spec).count;
  Int8Rows<Step> rows{.codes = arena.array<Step>(count * stride), .code_stride = stride,
                      .sums = arena.array<RowSum>(count * sums), .sum_count = sums, .tile = tile, .offset = nullptr};
  if (format == XFormat::int8_row_asymmetric) rows.offset = arena.array<float>(count);
  return rows;
}

// Rounds rows begin .. end of x.
template <class Dot>
void quantize_rows(const XView& x, const WeightSpec& spec, const Int8Rows<typename Dot::Step>& rows, Span range) {
  const int64_t padded = spec.padded_k();
  const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
  for (int64_t row = range.begin; row < range.end; row++)
    quantize_row<Dot>(spec, x.format, widen_row(x, row, padded, buffer.as<float>()), rows, row);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
