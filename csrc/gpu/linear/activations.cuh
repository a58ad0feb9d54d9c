// SPDX-License-Identifier: Apache-2.0
// Reorders activations for the products: one or several CTAs per row. Floats are cut into parts of bfloat16 that add up
// to them, x = x0 + x1 + x2; or they are rounded to int8 codes with a scale per row, or per group.
#pragma once

#include "formats/e4m3.hpp"
#include "gpu/device/floats.cuh"
#include "gpu/device/reduce.cuh"
#include "gpu/linear/call.hpp"

namespace lowbit::gpu {

// The upper 16 bits of two floats, packed.
LOWBIT_INLINE uint32_t upper_halves(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
}
LOWBIT_INLINE float upper_part(float a) { return __uint_as_float(__float_as_uint(a) & 0xffff0000u); }

// Values with 8 significant bits each, except the last, that add up to `value`.
template <int kParts>
LOWBIT_INLINE void cut(float value, float (&part)[kParts]) {
#pragma unroll
  for (int i = 0; i < kParts; i++) part[i] = value, value -= upper_part(value);
}

// Four k of a row, from 4 * word on: in one load, or in two if rows do not begin at multiples of 8 bytes.
LOWBIT_INLINE void load_word(const LinearCall& call, int64_t row, int64_t word, float (&x)[4]) {
  const int64_t at = row * call.spec.k + word * 4;
  if (call.spec.k % 4 == 0 && reinterpret_cast<std::size_t>(call.x) % 8 == 0 && word * 4 < call.spec.k) {
    const auto pair_at = [&](int64_t byte) {
      return *reinterpret_cast<const uint2*>(static_cast<const uint8_t*>(call.x) + byte);
    };
    if (call.dtype == DType::float32) {
      const uint2 low = pair_at(at * 4), high = pair_at(at * 4 + 8);
      x[0] = __uint_as_float(low.x), x[1] = __uint_as_float(low.y);
      x[2] = __uint_as_float(high.x), x[3] = __uint_as_float(high.y);
    } else {
      const uint2 word_of = pair_at(at * 2);
      const auto of = [&](uint32_t bits) {
        return call.dtype == DType::bfloat16 ? float_from_bfloat16(bits & 0xffff) : float_of_half(bits & 0xffff);
      };
      x[0] = of(word_of.x), x[1] = of(word_of.x >> 16), x[2] = of(word_of.y), x[3] = of(word_of.y >> 16);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int64_t k = word * 4 + i;
    x[i] = k < call.spec.k ? load_as_float(call.x, call.dtype, row * call.spec.k + k) : 0.0f;
  }
}

// The offset of chunk q of a tile for the lane with this word of a row; `count` pieces of two words per tile.
LOWBIT_INLINE int64_t ordered_at(const LinearCall& call, int64_t row, int64_t word, int count) {
  const int64_t tile = row / kRowsAtOnce * call.tiles + word / 16;
  return tile * count * 32 + row % kRowsAtOnce * 4 + word % 4;
}

// With activations as matrices of 8 rows x 16 bytes, for warpgroup products: index of the block of 8 rows x 64 k with
// this row and tile. All rows of a CTA's tile are contiguous.
LOWBIT_INLINE int64_t matrices_of(const LinearCall& call, int64_t row, int64_t tile) {
  const int64_t rows = int64_t{1} << call.log2_of_rows;
  return ((row >> call.log2_of_rows) * call.tiles + tile) * (rows / kRowsAtOnce) + row % rows / kRowsAtOnce;
}

// The bits of the largest |x| among words first, first + step ... before end of a row. Those of inf and nan are above
// all others.
LOWBIT_INLINE int32_t largest_of_words(const LinearCall& call, int64_t row, int64_t first, int64_t end, int step) {
  int32_t most = 0;
#pragma unroll 4  // loads in flight together: one CTA has the row
  for (int64_t word = first; word < end; word += step) {
    float x[4];
    load_word(call, row, word, x);
    for (const float v : x) most = Largest{}(most, __float_as_int(v) & INT32_MAX);
  }
  return most;
}
LOWBIT_INLINE int32_t largest_of_row(const LinearCall& call, int64_t row, int32_t (&warps)[kLinearWarps]) {
  return of_cta(Largest{}, largest_of_words(call, row, threadIdx.x, ceil_div(call.spec.k, 4), kLinearThreads), warps);
}

constexpr int32_t kInfinityBits = 0x7f800000;

// scale = amax / most, and its inverse; a nan or inf in the range makes the scale nan, and with it all results
// of the row.
struct Range {
  float scale, inverse, zero_point;

  LOWBIT_INLINE static Range symmetric(int32_t amax_bits, float most) {
    const bool finite = amax_bits < kInfinityBits;
    const float scale = finite ? __fdiv_rn(__int_as_float(amax_bits), most) : __builtin_nanf("");
    return {scale, scale >= 0x1p-126f ? __fdiv_rn(1.0f, scale) : 0.0f, 0.0f};
  }
};

// kSwapped: bytes and nibbles of codes are unpacked in pairs of k 0, 2 and 1, 3 (fragments.cuh), floats in order.
// kAlone: a weight of several parts, whose lower ones would turn inf into nan.
template <int kParts, bool kSwapped, bool kAlone>
LOWBIT_INLINE void order_floats(const LinearCall& call) {
  LOWBIT_SHARED(int32_t, warps, [kLinearWarps]);
  const int64_t row = blockIdx.x / static_cast<unsigned>(call.ctas_of_row),
                part_of_row = blockIdx.x % static_cast<unsigned>(call.ctas_of_row);
  const int32_t amax = largest_of_row(call, row, warps);
  const bool float8 = call.x_format == XFormat::float8_row;
  const Range range = Range::symmetric(amax, E4M3::largest);
  // Lower parts of a row below 2^-60 would be subnormal.
  const float up = amax < (127 - 60) << 23 ? 0x1p60f : 1.0f;
  if (threadIdx.x == 0)
    call.row_scale[row] = float8 ? range.scale : kAlone && amax >= kInfinityBits ? -1.0f : 1.0f / up;
  for (int64_t word = part_of_row * kLinearThreads + threadIdx.x; word < call.tiles * (kTileK / 4);
       word += call.ctas_of_row * kLinearThreads) {
    float x[4], part[4][kParts];
    load_word(call, row, word, x);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool finite = (__float_as_int(x[i]) & INT32_MAX) < kInfinityBits;
      if (float8) x[i] = E4M3::decode(E4M3::encode(f32{x[i] * range.inverse})).lane;
      else x[i] *= up;
      cut<kParts>(x[i] == x[i] ? x[i] : __builtin_nanf(""), part[i]);  // the upper half of some nans is inf
#pragma unroll
      for (int j = 1; j < kParts; j++)
        if (!finite) part[i][j] = 0.0f;
    }
    const int64_t at = ordered_at(call, row, word, kChunks * kParts) + word % 16 / 4 * kParts * 32;
    uint2* out = static_cast<uint2*>(call.ordered) + at;
#pragma unroll
    for (int j = 0; j < kParts; j++)
      out[j * 32] = {upper_halves(part[0][j], part[kSwapped ? 2 : 1][j]),
                     upper_halves(part[kSwapped ? 1 : 2][j], part[3][j])};
  }
}

// The threads that compute the codes of one scale: a warp for scales of groups, else the CTA.
template <bool kIsWarp>
struct Team {
  static constexpr int kSize = kIsWarp ? 32 : kLinearThreads;
  int32_t (&warps)[kLinearWarps];

  LOWBIT_INLINE static int rank() { return static_cast<int>(threadIdx.x) % kSize; }
  template <class Combine>
  LOWBIT_INLINE int32_t combined(Combine combine, int32_t value) const {
    if constexpr (kIsWarp) return of_warp(combine, value);
    else return of_cta(combine, value, warps);
  }
};

// x = scale * (q - zero_point) with q in -127..127 and a range that contains 0.
LOWBIT_INLINE Range asymmetric_range(const LinearCall& call, int64_t row, int32_t (&warps)[kLinearWarps]) {
  float lowest = 0.0f, highest = 0.0f;
  bool finite = true;
  for (int64_t k = threadIdx.x; k < call.spec.k; k += kLinearThreads) {
    const float x = load_as_float(call.x, call.dtype, row * call.spec.k + k);
    finite &= (__float_as_int(x) & INT32_MAX) < kInfinityBits;
    lowest = x < lowest ? x : lowest, highest = x > highest ? x : highest;
  }
  lowest = -__int_as_float(of_cta(Largest{}, __float_as_int(-lowest), warps));
  highest = __int_as_float(of_cta(Largest{}, __float_as_int(highest), warps));
  const bool all_finite = of_cta(Largest{}, static_cast<int32_t>(!finite), warps) == 0;
  const float scale = all_finite ? __fdiv_rn(highest - lowest, 254.0f) : __builtin_nanf("");
  if (!(scale >= 0x1p-126f)) return {scale, 0.0f, 0.0f};
  return {scale, __fdiv_rn(1.0f, scale), rintf(-127.0f - __fdiv_rn(lowest, scale))};
}

// The range of int8 codes of a whole row.
LOWBIT_INLINE Range range_of_row(const LinearCall& call, int64_t row, int32_t (&warps)[kLinearWarps]) {
  return call.x_format == XFormat::int8_row_asymmetric ? asymmetric_range(call, row, warps)
                                                       : Range::symmetric(largest_of_row(call, row, warps), 127.0f);
}

// Four codes as the bytes of a word, and their sum. Elements past the end of x have the code 0.
struct WordOfCodes {
  uint32_t codes;
  int32_t sum;
};
LOWBIT_INLINE WordOfCodes codes_of(const LinearCall& call, int64_t word, const float (&x)[4], const Range& range) {
  WordOfCodes of{};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const f32 scaled = fma(f32{x[i]}, f32{range.inverse}, f32{range.zero_point});
    const int32_t q = to_int(max(f32{-127.0f}, min(scaled, f32{127.0f}))).lane;
    if (word * 4 + i < call.spec.k) of.sum += q, of.codes |= static_cast<uint32_t>(q & 0xff) << 8 * i;
  }
  return of;
}

// Codes for k in [begin, end) of a row, and their sum. kMatrices: in the layout of warpgroup products.
template <bool kMatrices, bool kIsWarp>
LOWBIT_INLINE int32_t encode(const LinearCall& call, const Team<kIsWarp>& team, int64_t row, int64_t begin, int64_t end,
                             const Range& range) {
  int32_t sum = 0;
  constexpr int kAtOnce = kIsWarp ? 1 : 4;  // words per thread, with loads in flight together
  for (int64_t first = begin / 4 + team.rank(); first < end / 4; first += kAtOnce * team.kSize) {
    float x[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; i++)
      if (first + i * team.kSize < end / 4) load_word(call, row, first + i * team.kSize, x[i]);
#pragma unroll
    for (int i = 0; i < kAtOnce; i++) {
      const int64_t word = first + i * team.kSize;
      if (word >= end / 4) break;
      const WordOfCodes of = codes_of(call, word, x[i], range);
      sum += of.sum;
      const int64_t at = ordered_at(call, row, word, kChunks / 2) + word % 16 / 8 * 32,
                    of_matrix = matrices_of(call, row, word / 16) * 128 + word % 16 / 4 * 32 + row % kRowsAtOnce * 4 +
                                word % 4;
      static_cast<uint32_t*>(call.ordered)[kMatrices ? of_matrix : at * 2 + word % 8 / 4] = of.codes;
    }
  }
  return team.combined(Total{}, sum);
}

// The part of a symmetric weight's zero point that is subtracted before accumulators become floats. For int4 it is 0,
// and the zero point is applied later, as on the CPU.
template <Format kFormat>
constexpr int kCodeOffset = kFormat == Format::int4 ? 0 : symmetric_zero(kFormat);

// tile_groups: sums per tile (call.hpp) if kParts; else one over all k, in one CTA. code_offset: kCodeOffset
// of the weight.
template <bool kParts, bool kMatrices = false>
LOWBIT_INLINE void quantize_rows(const LinearCall& call, int tile_groups, int code_offset) {
  LOWBIT_SHARED(int32_t, warps, [kLinearWarps]);
  const Team<kParts> team{warps};
  const WeightSpec& spec = call.spec;
  const int64_t row = blockIdx.x / static_cast<unsigned>(call.ctas_of_row),
                part_of_row = blockIdx.x % static_cast<unsigned>(call.ctas_of_row);
  const int64_t padded = call.tiles * kTileK, part = kParts ? kTileK / tile_groups : padded;
  const bool per_row = call.x_format != XFormat::int8_group || spec.group_size == 0;
  Range range{};
  if (per_row) range = range_of_row(call, row, warps);
  if (threadIdx.x == 0) call.row_offset[row] = -range.scale * range.zero_point;
  const int64_t span = per_row ? part : larger(part, spec.group_size);  // elements with one scale
  const int64_t step = kParts ? call.ctas_of_row * kLinearWarps * span : span;
  for (int64_t begin = kParts ? (part_of_row * kLinearWarps + threadIdx.x / 32) * span : 0; begin < padded;
       begin += step) {
    const int64_t end = smaller(begin + span, padded);
    if (!per_row) {
      int32_t most = 0;
      for (int64_t k = begin + team.rank(); k < smaller(end, spec.k); k += team.kSize)
        most = Largest{}(most, __float_as_int(load_as_float(call.x, call.dtype, row * spec.k + k)) & INT32_MAX);
      range = Range::symmetric(team.combined(Largest{}, most), 127.0f);
    }
    for (int64_t at = begin; at < end; at += part) {
      const int32_t sum = encode<kMatrices>(call, team, row, at, at + part, range);
      const float scaled = range.scale * static_cast<float>(sum);
      if (team.rank() == 0)
        call.sums[(row * padded + at) / part] = {
            .scale = range.scale, .zero = code_offset == 0 && !spec.asymmetric ? -8.0f * scaled : 0.0f,
            .sum = spec.asymmetric ? scaled : 0.0f, .start = -code_offset * sum};
    }
  }
}

template <Format kFormat, int kTileGroups, bool kMatrices>
LOWBIT_INLINE void quantize_rows(const LinearCall& call) {
  quantize_rows<(kTileGroups > 0), kMatrices>(call, kTileGroups, kCodeOffset<kFormat>);
}

}  // namespace lowbit::gpu
