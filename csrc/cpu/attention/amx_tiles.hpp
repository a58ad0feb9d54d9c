// SPDX-License-Identifier: Apache-2.0
// Rows of a head as factors of products in parts of bfloat16 (cpu/part_products.hpp): as activations, and packed as
// weight tiles.
#pragma once

#include "cpu/attention/visible.hpp"
#include "cpu/part_products.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Max bytes that a thread or a call packs at a time: 16384 queries of head dimension 128 and one kv head, in one part.
constexpr int64_t kMaxPackedBytes = 64 << 20;

// The element type of rows that are cut into kParts.
template <int kParts>
using Whole = std::conditional_t<kParts == 1, bfloat16_bits, float16_bits>;

// One row of elements in parts, padded with zeros to whole steps.
template <int kParts>
void cut_row(const Whole<kParts>* from, int64_t columns, uint8_t* to) {
  const int64_t whole = columns / kStep * kStep;
  const auto cut_step = [&](const Whole<kParts>* step) {
    if constexpr (kParts == 1) std::memcpy(to, step, kStepBytes);
    else cut_rounded<kParts>(load16(step), load16(step + 16), to);
    to += kParts * kStepBytes;
  };
  for (int64_t c = 0; c < whole; c += kStep) cut_step(from + c);
  if (whole == columns) return;
  Whole<kParts> last[kStep] = {};
  std::memcpy(last, from + whole, (columns - whole) * sizeof(last[0]));
  cut_step(last);
}

template <int kParts>
void cut_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, PartRows to) {
  const auto* from = reinterpret_cast<const Whole<kParts>*>(head.data) + first * head.stride;
  for (int64_t r = 0; r < rows; r++) cut_row<kParts>(from + r * head.stride, columns, to.row(r));
}

// Rows of codes, rounded; buffer: as many rows of floats.
template <int kParts>
void round_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, Matrix<float> buffer, PartRows to) {
  widen_rows(head, first, rows, columns, 1.0f, buffer);
  cut_rows<kParts>(buffer, rows, {0, columns}, to);
}

// Rows of a head as columns of tiles, with `columns` as the depth: [rows / 16][columns / 32][part], each tile with 16
// rows as its columns. Zeros for missing rows, up to a multiple of 32. buffer: 16 rows; floats: the same, for codes.
template <int kParts>
void pack_transposed(const HeadView& head, int64_t first, int64_t rows, int64_t columns, PartRows buffer, uint8_t* to,
                     Matrix<float> floats = {}) {
  const int64_t width = steps_of(columns) * kParts;
  for (int64_t r = 0; r < round_up(rows, kStep); r += kTileRows, to += width * kTileBytes) {
    const int64_t count = larger(0, smaller(kTileRows, rows - r));
    if (head.scale) round_rows<kParts>(head, first + r, count, columns, floats, buffer);
    else cut_rows<kParts>(head, first + r, count, columns, buffer);
    for (int64_t i = count; i < kTileRows; i++) std::memset(buffer.row(i), 0, width * kStepBytes);
    transpose_parts(buffer, width, to);
  }
}

// Rows of a head as the depth: [columns / 16][rows / 32][part], zeros for missing rows. buffer: 32 rows.
template <int kParts>
void pack_rows(const HeadView& head, int64_t first, int64_t rows, int64_t columns, int64_t max_rows,
               Matrix<float> buffer, uint8_t* to) {
  for (int64_t r = 0; r < rows; r += kStep) {
    const int64_t count = smaller(kStep, rows - r);
    widen_rows(head, first + r, count, columns, 1.0f, buffer);
    clear_rows(buffer.from(count), kStep - count);
    pack_tiles<kParts>(buffer, 1, {0, columns}, steps_of(max_rows), to + r / kStep * kParts * kTileBytes);
  }
}

// The pairs of parts multiplied for scores: all, because an omitted one shows in lse.
constexpr Pairs kScorePairs = Pairs::all;

// The columns that any row sees, in whole steps of the products.
LOWBIT_INLINE Span steps_seen(const Visible<float>& visible, int64_t rows) {
  if (!visible.spans) return {0, round_up(visible.all.end, kStep)};
  Span seen{visible.all.end, 0};
  for (int64_t t = 0; t < product_tiles(rows).count; t++) {
    if (visible.spans[t].begin >= visible.spans[t].end) continue;
    seen.begin = smaller(seen.begin, visible.spans[t].begin);
    seen.end = larger(seen.end, visible.spans[t].end);
  }
  return {seen.begin / kStep * kStep, round_up(seen.end, kStep)};
}

// Scales the products of `rows` rows, for the columns of a span.
LOWBIT_INLINE void scale_rows(Matrix<float> scores, int64_t rows, Span columns, float scale) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = columns.begin; c < columns.end; c += 16)
      store(scores.row(r) + c, mul(load(scores.row(r) + c), set1(scale)));
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
