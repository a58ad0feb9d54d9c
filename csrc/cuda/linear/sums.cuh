// SPDX-License-Identifier: Apache-2.0
// The end of a product: scales of accumulated codes, the ordered sum over splits of k, and the epilogue.
#pragma once

#include "cuda/linear/call.hpp"
#include "cuda/linear/fragments.cuh"
#include "gpu/linear/epilogue.cuh"

namespace lowbit::cuda {

// Scales a sum of products of codes with the numbers of its row (RowSum).
template <Format kFormat, bool kAsymmetric>
LOWBIT_INLINE float scaled_sum(int32_t dot, const RowSum& of_row, float zero) {
  const auto whole = static_cast<int32_t>(static_cast<uint32_t>(dot) + static_cast<uint32_t>(of_row.start));
  const float scaled = __fmaf_rn(static_cast<float>(whole), of_row.scale, of_row.zero);
  return kAsymmetric ? __fmaf_rn(zero - static_cast<float>(kCodeOffset<kFormat>), -of_row.sum, scaled) : scaled;
}

// The epilogue for the sum over all k.
template <Format kFormat, bool kCodes, int kTileGroups, class Whole>
LOWBIT_INLINE float finished_whole(const LinearCall& call, const ColumnEnds& ends, int64_t row, int64_t n, Whole whole) {
  PendingScales pending{true, 1.0f};
  float sum;
  if constexpr (kCodes) {
    sum = kTileGroups ? whole : scaled_sum<kFormat, false>(whole, call.sums[row], 0.0f);
  } else {
    sum = whole;
    if (call.row_scale && !stays_float(call.x_format)) sum *= call.row_scale[row];  // for codes, as for scaled sums
    else if (call.row_scale) pending.row_scale = call.row_scale[row];  // null: original activations
    if (kWeightParts<kFormat> > 1 && pending.row_scale < 0.0f)
      sum = nonfinite_dot<kFormat>(call, row, n), pending = {false, 1.0f};
  }
  return finished<kFormat>(call, ends, row, row * call.spec.n + n, sum, pending);
}
template <Format kFormat, bool kCodes, int kTileGroups, class Whole>
LOWBIT_INLINE void store_whole(const LinearCall& call, int64_t row, int64_t n, Whole whole) {
  const float value = finished_whole<kFormat, kCodes, kTileGroups>(call, ColumnEnds::of<kFormat>(call, n), row, n, whole);
  store_from_float(call.y, call.dtype, row * call.spec.n + n, value);
}

// Columns n to n + 3, as far as they exist.
template <Format kFormat>
LOWBIT_INLINE void ends_of_four(const LinearCall& call, int64_t n, ColumnEnds (&ends)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) ends[i] = ColumnEnds::of<kFormat>(call, smaller(n + i, call.spec.n - 1));
}
template <Format kFormat, bool kCodes, int kTileGroups, class Whole>
LOWBIT_INLINE void store_four_wholes(const LinearCall& call, const ColumnEnds (&ends)[4], int64_t row, int64_t n,
                                     const Whole (&whole)[4]) {
  float value[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    value[i] = finished_whole<kFormat, kCodes, kTileGroups>(call, ends[i], row, smaller(n + i, call.spec.n - 1), whole[i]);
  store_four(call, row, n, value);
}

// Four adjacent sums, in one access if they begin at a multiple of four; else the first `count`.
template <class Sum>
LOWBIT_INLINE void load_four(const Sum* from, bool aligned, int count, Sum (&to)[4]) {
  if (aligned) {
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    const uint32_t each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = __builtin_bit_cast(Sum, each[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < count) to[i] = from[i];
  }
}
template <class Sum>
LOWBIT_INLINE void store_four_sums(Sum* to, bool aligned, int64_t count, const Sum (&sum)[4]) {
  if (aligned) {
    *reinterpret_cast<uint4*>(to) = {__builtin_bit_cast(uint32_t, sum[0]), __builtin_bit_cast(uint32_t, sum[1]),
                                     __builtin_bit_cast(uint32_t, sum[2]), __builtin_bit_cast(uint32_t, sum[3])};
  } else {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (i < count) to[i] = sum[i];
  }
}

// One thread per four results of a row.
template <Format kFormat, bool kCodes, int kTileGroups>
LOWBIT_INLINE void add_splits(const ProductCall& given) {
  using Result = std::conditional_t<kCodes && kTileGroups == 0, int32_t, float>;
  const LinearCall& call = given.call;
  const auto fours = static_cast<uint32_t>(ceil_div(call.spec.n, 4)),  // per row; fewer than 2^31 in all
      number = static_cast<uint32_t>(blockIdx.x) * kLinearThreads + threadIdx.x;
  const int64_t row = number / fours, n = static_cast<int64_t>(number % fours) * 4, all = call.m * call.spec.n;
  if (row >= call.m) return;
  const int count = static_cast<int>(smaller(call.spec.n - n, 4));
  const auto* partial = static_cast<const Result*>(given.partial) + row * call.spec.n + n;
  Result whole[4] = {};
  for (int split = 0; split < given.splits; split++, partial += all) {
    Result part[4] = {};
    load_four(partial, call.spec.n % 4 == 0, count, part);
#pragma unroll
    for (int i = 0; i < 4; i++) whole[i] += part[i];
  }
  ColumnEnds ends[4];
  ends_of_four<kFormat>(call, n, ends);
  store_four_wholes<kFormat, kCodes, kTileGroups>(call, ends, row, n, whole);
}

}  // namespace lowbit::cuda
