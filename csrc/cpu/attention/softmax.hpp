// SPDX-License-Identifier: Apache-2.0
// Online softmax of a tile of queries over tiles of keys. Over the keys seen so far, per row,
//   sum = sum over k of exp(s - base),  out = sum over k of exp(s - base) v
// base is -inf until the row sees a key. It follows the largest score, but only when that has grown by kSlack: a factor
// of at most exp(kSlack) costs a float no accuracy, and out need not be rescaled each time a row meets a slightly
// larger score. That happened in a fifth of the rows of 2048 keys, and with its mispredicted branches took a quarter of
// the softmax (AVX2, Zen 5).
#pragma once

#include "cpu/attention/scores.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr double kSlack = 5.5;  // e^5.5 = 245

template <class T>
struct RunningSoftmax {
  T *base, *largest;  // one per row; largest: over all scores, kept only for max_scores
  T* sums;            // 16 partial sums per row
  Matrix<T> out;
  int64_t columns;  // columns of out
  bool keeps_largest;
  T scale = 1;  // > 0; factor of scores not yet multiplied by it

  LOWBIT_INLINE RunningSoftmax from(int64_t r) const {
    return {base + r, largest + r, sums + 16 * r, out.from(r), columns, keeps_largest, scale};
  }
};

template <class T>
void start_softmax(const RunningSoftmax<T>& softmax, int64_t rows) {
  fill(softmax.base, rows, kMinusInfinity<T>), fill(softmax.largest, rows, kMinusInfinity<T>),
      fill(softmax.sums, 16 * rows, T{0});
  clear_rows(softmax.out, rows);
}

// Row r has a score above its base by more than kSlack, or a nan: raises the base to the largest, and rescales the sums
// so far.
template <class T>
[[gnu::noinline]] void raise_base(const RunningSoftmax<T>& softmax, int64_t r, T highest) {
  const T before = softmax.base[r];
  softmax.base[r] = highest;
  if (before == kMinusInfinity<T>) return;
  const auto factor = e_to_the(set1(before - highest));
  store(softmax.sums + 16 * r, mul(load(softmax.sums + 16 * r), factor));
  T* out = softmax.out.row(r);
  for (int64_t c = 0; c < softmax.columns; c += 16) store(out + c, mul(load(out + c), factor));
}

// Updates the base of row r with the largest score of columns `span`. Returns the number to add to scores * scale
// before exponentiation.
template <class T>
LOWBIT_INLINE auto follow_largest(const RunningSoftmax<T>& softmax, int64_t r, const T* row, Span span) {
  auto top = load(row + span.begin), second = load(row + span.end - 16);
  for (int64_t c = span.begin + 16; c < span.end - 16; c += 32)
    top = max(load(row + c), top), second = max(load(row + c + 16), second);
  top = mul(max(second, top), set1(softmax.scale));
  if (softmax.keeps_largest) {
    const T highest = largest(top), before = softmax.largest[r];
    softmax.largest[r] = highest > before || highest != highest ? highest : before;
  }
  if (!all_at_most(top, set1(softmax.base[r] + static_cast<T>(kSlack)))) raise_base(softmax, r, largest(top));
  return set1(softmax.base[r] == kMinusInfinity<T> ? T{0} : -softmax.base[r]);
}

// scores -> exp(scale * scores - base), for columns `span` of one row.
template <class T>
LOWBIT_INLINE void softmax_row(const RunningSoftmax<T>& softmax, int64_t r, T* row, Span span) {
  const auto origin = follow_largest(softmax, r, row, span), scale = set1(softmax.scale);
  auto total = load(softmax.sums + 16 * r);
  for (int64_t c = span.begin; c < span.end; c += 16) {
    const auto p = e_to_the(fma(load(row + c), scale, origin));
    store(row + c, p);
    total = add(total, p);
  }
  store(softmax.sums + 16 * r, total);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
