// SPDX-License-Identifier: Apache-2.0
// Packs a float weight to panels: one kernel computes scales and zero points of a panel, a second one its codes. Both
// follow csrc/cpu/quantize/quantize.cpp operation by operation, with the same bits; only sums of squares are added in a
// different order.
#pragma once

#include "formats/scale_search.hpp"
#include "gpu/device/floats.cuh"
#include "gpu/device/vector.cuh"
#include "gpu/quantize/pack_call.hpp"

namespace lowbit::gpu {

constexpr int kSlots = kPackThreads / static_cast<int>(kPanelColumns);

// The maximum over the 16 threads of a column. `of_slots` has no other use.
LOWBIT_INLINE float greatest_of_column(float (&of_slots)[kSlots][kPanelColumns], float value) {
  const int column = threadIdx.x % kPanelColumns;
  of_slots[threadIdx.x / kPanelColumns][column] = value;
  __syncthreads();
  for (int slot = 0; slot < kSlots; slot++) value = of_slots[slot][column] > value ? of_slots[slot][column] : value;
  return value;
}

// The index of group g of a row in scale, zero and levels.
LOWBIT_INLINE int64_t room_of(const PackCall& call, int64_t row, int64_t g) {
  return (row / kPanelColumns * call.groups + g) * kPanelColumns + row % kPanelColumns;
}

// A row of the weight, which is a column of the panel; zeros past its end.
struct PackColumn {
  const PackCall& call;
  int64_t row;
  float importance_factor;

  LOWBIT_INLINE float weight(int64_t k) const {
    return row < call.n && k < call.k ? load_as_float(call.weight, call.dtype, row * call.k + k) : 0.0f;
  }
  LOWBIT_INLINE float importance(int64_t k) const {
    return !call.importance ? 1.0f : k < call.k ? call.importance[k] * importance_factor : 0.0f;
  }
};

// One of its groups, divided by its absmax scale, for the search.
struct PackGroup {
  static constexpr bool kSparesClamps = false;  // clamping costs few instructions; avoiding it, a seventh of the kernel
  const PackColumn& column;
  int64_t begin, count;
  float code_max, inverse;

  LOWBIT_INLINE f32 y(int64_t i) const { return {column.weight(begin + i) * inverse}; }
  LOWBIT_INLINE float importance(int64_t i) const { return column.importance(begin + i); }
  LOWBIT_INLINE f32 to_float16(f32 scale) const { return {float_from_float16(float16_from_float(scale.lane))}; }
};

// The stored scale of a group, divided by the power of two of its column: bits and value.
struct HalfScale {
  uint16_t bits;
  float value;
  LOWBIT_INLINE HalfScale(float scale, float factor)
      : bits(float16_from_float(scale * (factor > 0.0f ? 1.0f / factor : 0.0f))),
        value(float_from_float16(bits) * factor) {}
};

template <Format kFormat>
LOWBIT_INLINE i32 code_of(float w, float scale, float zero, float code_max) {
  const float divisor = scale != 0.0f ? scale : 1.0f;
  return nearest_code<codec_of<kFormat>>(add(div(f32{w}, f32{divisor}), f32{zero}), code_max);
}

struct PackShared {
  float most[2][kSlots][kPanelColumns], lost[kSlots][kPanelColumns], importance[kSlots][kPanelColumns];
  float sums[3][kPackThreads];
};

// Adds up the sums of a panel's threads, in order.
LOWBIT_INLINE void add_up(const PackCall& call, float (&of)[3][kPackThreads], float signal, float noise,
                          float absmax_noise) {
  of[0][threadIdx.x] = signal, of[1][threadIdx.x] = noise, of[2][threadIdx.x] = absmax_noise;
  __syncthreads();
  if (threadIdx.x >= 3) return;
  float sum = 0;
  for (int i = 0; i < kPackThreads; i++) sum += of[threadIdx.x][i];
  call.sums[blockIdx.x * 3 + threadIdx.x] = sum;
}

// Importances are divided by the power of two of the largest.
LOWBIT_INLINE float importance_factor(const PackCall& call, PackShared& shared) {
  if (!call.importance) return 1.0f;
  float most = 0x1p-126f;
  for (int64_t k = threadIdx.x / kPanelColumns; k < call.k; k += kSlots)
    most = call.importance[k] > most ? call.importance[k] : most;
  return 1.0f / power_of_two_below(greatest_of_column(shared.importance, most));
}

template <class Codec>
LOWBIT_INLINE void choose_ranges(const PackColumn& column, int64_t g, float& scale, float& low) {
  const PackCall& call = column.call;
  float high = 0;
  low = 0;
  for (int64_t k = g * call.group_k; k < smaller(call.padded_k, (g + 1) * call.group_k); k++) {
    const float w = column.weight(k);
    low = w < low ? w : low, high = w > high ? w : high;
  }
  scale = scale_of_range<Codec>(low, high, call.mapping, call.code_max);
}

// Noise and levels of group g for its chosen scale.
template <Format kFormat>
LOWBIT_INLINE void weigh_codes(const PackColumn& column, int64_t g, float scale, float zero, int64_t at, float& signal,
                               float& noise) {
  const PackCall& call = column.call;
  ColumnSum<kFormat> sum;
  for (int64_t k = g * call.group_k; k < smaller(call.padded_k, (g + 1) * call.group_k); k++) {
    const float w = column.weight(k), h = column.importance(k);
    const i32 code = code_of<kFormat>(w, scale, zero, call.code_max);
    const float error = w - (codec_of<kFormat>::level_of(code).lane - zero) * scale;
    signal = __builtin_fmaf(h * w, w, signal), noise = __builtin_fmaf(h * error, error, noise);
    if (k < call.k) sum.add(code.lane);
  }
  call.levels[at] = sum.levels;
}

LOWBIT_INLINE void store_half(const PackCall& call, int64_t section, int64_t row, int64_t g, uint16_t half) {
  *reinterpret_cast<uint16_t*>(call.packed + call.to.at(section, 2, row, g)) = half;
}

// kMaySearch: if not, `searches` is false, and its code is not compiled.
template <Format kFormat, bool kMaySearch = true>
LOWBIT_INLINE void pack_scales(const PackCall& call) {
  using Codec = codec_of<kFormat>;
  LOWBIT_SHARED(PackShared, shared, [1]);
  const PackColumn column{call, blockIdx.x * kPanelColumns + threadIdx.x % kPanelColumns,
                          importance_factor(call, shared[0])};
  const int64_t slot = threadIdx.x / kPanelColumns;

  float most = 0;
  for (int64_t g = slot; g < call.groups; g += kSlots) {
    choose_ranges<Codec>(column, g, call.scale[room_of(call, column.row, g)], call.zero[room_of(call, column.row, g)]);
    most = call.scale[room_of(call, column.row, g)] > most ? call.scale[room_of(call, column.row, g)] : most;
  }
  float factor = power_of_two_below(greatest_of_column(shared[0].most[0], most));
  float lost = factor < 0x1p126f ? 0.0f : 1.0f;  // whether a scale loses a bit if the column's power of two doubles
  for (int64_t g = slot; g < call.groups; g += kSlots) {
    float& scale = call.scale[room_of(call, column.row, g)];
    if (call.half_scales) scale = HalfScale(scale, factor).value;
    if (!(scale == 0.0f || scale >= 0x1p-13f * factor)) lost = 1.0f;
    float& zero = call.zero[room_of(call, column.row, g)];
    zero = call.asymmetric ? zero_of_range(zero, scale, call.code_max) : call.symmetric_zero;
  }

  float signal = 0, noise = 0, absmax_noise = 0;
  if (kMaySearch && call.searches) {
    const bool fine = greatest_of_column(shared[0].lost, lost) == 0.0f;
    const float limit = !call.half_scales ? 0x1p127f : fine ? 4.0f : 2.0f, unit = call.half_scales ? factor : 1.0f;
    most = 0;
    for (int64_t g = slot; g < call.groups; g += kSlots) {
      float &scale = call.scale[room_of(call, column.row, g)], &zero = call.zero[room_of(call, column.row, g)];
      const int64_t begin = g * call.group_k;
      const PackGroup group{column, begin, smaller(call.group_k, call.padded_k - begin), call.code_max,
                            scale > 0.0f ? 1.0f / scale : 0.0f};
      const ChosenScale<f32> choice =
          search<Codec, true>(group, call.asymmetric, call.half_scales,
                              f32{scale / (unit > 0x1p-126f ? unit : 0x1p-126f)}, f32{zero}, f32{limit});
      absmax_noise += choice.absmax_error.lane * scale * scale;
      scale = choice.scale.lane * unit, zero = choice.zero.lane;
      const float size = scale < 0 ? -scale : scale;
      most = size > most ? size : most;
    }
    factor = power_of_two_below(greatest_of_column(shared[0].most[1], most));
  }

  for (int64_t g = slot; g < call.groups; g += kSlots) {
    float& scale = call.scale[room_of(call, column.row, g)];
    if (call.half_scales) {
      const HalfScale half(scale, factor);
      scale = half.value;
      store_half(call, call.to.group_scale, column.row, g, half.bits);
    } else {
      factor = scale;
    }
    const float zero = call.zero[room_of(call, column.row, g)];
    if (call.asymmetric) store_half(call, call.to.zero, column.row, g, float16_from_float(zero));
    weigh_codes<kFormat>(column, g, scale, zero, room_of(call, column.row, g), signal, noise);
  }
  if (slot == 0) {
    *reinterpret_cast<float*>(call.packed + call.to.at(call.to.column_scale, 4, column.row)) = factor;
    if (call.groups % 2) {  // a section is padded with zeros to 64 bytes: two groups
      if (call.half_scales) store_half(call, call.to.group_scale, column.row, call.groups, 0);
      if (call.asymmetric) store_half(call, call.to.zero, column.row, call.groups, 0);
    }
  }
  add_up(call, shared[0].sums, signal, noise, kMaySearch && call.searches ? absmax_noise : noise);
}

// Four codes of a column from k on, one per byte.
template <Format kFormat>
LOWBIT_INLINE uint32_t four_codes(const PackColumn& column, int64_t k) {
  const PackCall& call = column.call;
  if (k >= call.groups * call.group_k) return 0;  // with groups of 32 or 16 the last tile may have no code there
  const int64_t at = room_of(call, column.row, k / call.group_k);
  const float scale = call.scale[at], zero = call.zero[at];
  uint32_t four = 0;
  for (int i = 0; i < 4; i++)
    four |= unsigned_of(code_of<kFormat>(column.weight(k + i), scale, zero, call.code_max)) << 8 * i;
  return four;
}

// 4 bytes of a panel's codes: pieces of the codes of 4 k of a column, and of codes that share these bytes (codec.hpp).
template <Format kFormat>
LOWBIT_INLINE void pack_word(const PackCall& call, int64_t panel, int64_t word) {
  const int64_t tile_words = call.bits * 32;
  int64_t in_plane = word % tile_words;
  int count = 1;
  for (; !(call.bits & count) || in_plane >= 32 * count; count *= 2)
    if (call.bits & count) in_plane -= 32 * count;
  const PackColumn column{call, panel * kPanelColumns + in_plane % kPanelColumns, 1.0f};
  const uint32_t mask = 0x01010101u * ((1u << count) - 1);
  uint32_t pieces = 0;
  int64_t k = word / tile_words * kTileK + in_plane / kPanelColumns * 4;
  for (int shift = 0; shift < 8; shift += count, k += 8 * count)
    pieces |= (four_codes<kFormat>(column, k) >> bits_before_piece(call.bits, count) & mask) << shift;
  reinterpret_cast<uint32_t*>(call.packed + panel * call.to.row_bytes + call.to.codes)[word] = pieces;
}

template <Format kFormat>
LOWBIT_INLINE void pack_codes(const PackCall& call) {
  const int64_t panel = blockIdx.x, words = call.padded_k / kTileK * call.bits * 32;
  for (int64_t word = threadIdx.x; word < words; word += kPackThreads) pack_word<kFormat>(call, panel, word);
  if (threadIdx.x >= kPanelColumns) return;
  const int64_t row = panel * kPanelColumns + threadIdx.x;
  ColumnSum<kFormat> sum;
  for (int64_t g = 0; g < call.groups; g++) {
    sum.levels = call.levels[room_of(call, row, g)];
    const float scale = call.half_scales ? float_from_float16(*reinterpret_cast<const uint16_t*>(
                                               call.packed + call.to.at(call.to.group_scale, 2, row, g)))
                                         : 1.0f;
    const int64_t begin = g * call.group_k;
    sum.end_group(smaller(call.k, begin + call.group_k) - begin, call.zero[room_of(call, row, g)], scale);
  }
  *reinterpret_cast<float*>(call.packed + call.to.at(call.to.column_sum, 4, row)) =
      sum.total(*reinterpret_cast<const float*>(call.packed + call.to.at(call.to.column_scale, 4, row)));
}

// A weight of a float format, which has codes alone.
template <Format kFormat>
LOWBIT_INLINE void pack_floats(const PackCall& call) {
  using Codec = codec_of<kFormat>;
  LOWBIT_SHARED(PackShared, shared, [1]);
  const PackColumn column{call, blockIdx.x * kPanelColumns + threadIdx.x % kPanelColumns, 1.0f};
  float signal = 0, noise = 0;
  for (int64_t k = threadIdx.x / kPanelColumns; k < call.padded_k; k += kSlots) {
    const float w = column.weight(k);
    const bool there = column.row < call.n && k < call.k;
    const typename Codec::Code code = there ? Codec::encode(w) : typename Codec::Code{0};
    const float error = w - Codec::decode(code);
    signal = __builtin_fmaf(w, w, signal), noise = __builtin_fmaf(error, error, noise);
    *reinterpret_cast<typename Codec::Code*>(call.packed + blockIdx.x * call.to.row_bytes +
                                             PanelLayout::float_at<kFormat>(threadIdx.x % kPanelColumns, k)) = code;
  }
  add_up(call, shared[0].sums, signal, noise, 0.0f);
}

LOWBIT_INLINE void all_finite(const FiniteCall& call) {
  LOWBIT_SHARED(int32_t, found, [kPackThreads]);
  int32_t mine = 0;
  for (int64_t at = blockIdx.x * kFiniteStretch; at < call.count; at += kMaxFiniteCtas * kFiniteStretch)
    for (int64_t i = at + threadIdx.x; i < smaller(call.count, at + kFiniteStretch); i += kPackThreads) {
      const float x = load_as_float(call.data, call.dtype, i);
      if (!(x - x == 0.0f)) mine = 1;
    }
  found[threadIdx.x] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kPackThreads; i++) mine |= found[i];
  call.found[blockIdx.x] = mine;
}

}  // namespace lowbit::gpu
