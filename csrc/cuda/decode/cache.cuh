// SPDX-License-Identifier: Apache-2.0
// Keys and values from the cache, in shared memory and as fragments for the tensor cores: codes are 64ths in bfloat16,
// exactly, and their scales are 64 times as large.
//
// Lane (g, t) takes 8 columns, out of a group of 32, of key g, in two steps of 16 k. Values are transposed in units of
// 16 bits: the lane gets, for two adjacent tokens, a float, two int8 codes or four int4 codes.
#pragma once

#include "cuda/decode/rotate.cuh"
#include "cuda/device/tiles.cuh"
#include "gpu/linear/activations.cuh"

namespace lowbit::cuda {

// The dtype of the factors of a product.
template <DType kCache>
constexpr DType kProduct = kCache == DType::float16 ? DType::float16 : DType::bfloat16;

LOWBIT_INLINE void int8_to_bf16(uint32_t codes, uint32_t& even, uint32_t& odd) {
  const uint32_t bytes = codes ^ 0x80808080u;
  even = units_to_bf16<128>(bytes & 0x00ff00ffu), odd = units_to_bf16<128>(__byte_perm(bytes, 0, 0x4341));
}
// Nibbles 0 .. 15 for -8 .. 7: the lower nibbles of bytes 0 and 2, 1 and 3; then the upper ones.
LOWBIT_INLINE void int4_to_bf16(uint32_t codes, uint32_t& low_even, uint32_t& low_odd, uint32_t& high_even,
                                uint32_t& high_odd) {
  const auto low = [](uint32_t word) { return units_to_bf16<8>(word & 0x000f000fu); };
  const auto high = [](uint32_t word) { return units_to_bf16<8>(word & 0x00f000f0u, 4); };
  low_even = low(codes), low_odd = low(codes >> 8), high_even = high(codes), high_odd = high(codes >> 8);
}

// A pair of floats as 16-bit parts that add up to it.
template <DType dtype, int kParts>
LOWBIT_INLINE void cut_pair(float low, float high, uint32_t (&part)[kParts]) {
  if constexpr (kParts == 1) {
    part[0] = pair_of<dtype>(low, high);
  } else if constexpr (dtype == DType::bfloat16) {  // the first part is truncated: finite values stay finite
    const float first = upper_part(low), second = upper_part(high);
    part[0] = upper_halves(first, second), part[1] = pair_of_bf16(low - first, high - second);
  } else {
    part[0] = pair_of_f16(low, high);
    part[1] = pair_of_f16(low - float_of_half(part[0] & 0xffffu), high - float_of_half(part[0] >> 16));
  }
}

// Keys or values in flight to a warp: its tiles in turn, copied by 16 bytes, with zeros past the last token and the
// last column. Scales stay in registers, as stored.
template <DecodeShape kShape, bool kOfValues>
struct RowsAhead {
  static constexpr int kTokens = kShape.tokens(), kStride = kOfValues ? kShape.v_row_bytes() : kShape.row_bytes();
  static constexpr int kElement = kShape.codes() ? 1 : 2, kScales = kOfValues ? kShape.v_scales() : kShape.scales();
  static constexpr int kPieces = (kOfValues ? kShape.v_groups : kShape.groups) * kShape.group_bytes() / 16;
  static constexpr int kScaleLanes = kScales ? kScales : 1;
  static constexpr int kEach = 32 / kPieces, kScaleEach = 32 / kScaleLanes;  // tokens per copy by all lanes
  static constexpr int kHeld = kScales ? (kTokens + kScaleEach - 1) / kScaleEach : 0;

  const CacheRows& rows;
  const char* from;
  int64_t scale_from;
  uint32_t held[kHeld + 1];

  // The first token of this lane, and its piece of each; the same for scales.
  LOWBIT_INLINE static int token() { return lane_of_warp() / kPieces; }
  LOWBIT_INLINE static int piece() { return lane_of_warp() % kPieces; }
  LOWBIT_INLINE static int scale_token() { return lane_of_warp() / kScaleLanes; }
  LOWBIT_INLINE static int scale() { return lane_of_warp() % kScaleLanes; }

  LOWBIT_INLINE RowsAhead(const CacheRows& rows, int b, int head, int64_t first) : rows(rows) {
    from = static_cast<const char*>(rows.data) +
           (b * rows.batch + head * rows.head + (first + token()) * rows.row) * kElement + piece() * 16;
    scale_from = b * rows.scale_batch + head * rows.scale_head + (first + scale_token()) * rows.scale_row + scale();
  }

  // Starts copying a tile with `tokens` tokens, and advances past the tiles of the other warps.
  LOWBIT_INLINE void copy(char* to, int tokens) {
    const char* row = from;
    to += token() * kStride + piece() * 16;
    if (tokens > 0)
#pragma unroll
      for (int i = 0; i < kTokens; i += kEach, row += kEach * rows.row * kElement)
        if (token() < kEach && i + token() < kTokens)
          copy_async(reinterpret_cast<uint16_t*>(to + i * kStride), reinterpret_cast<const uint16_t*>(row),
                     piece() < rows.pieces && i + token() < tokens);
    commit_copies();
    from += kDecodeWarps * kTokens * rows.row * kElement;
    hold_scales(tokens);
    scale_from += kDecodeWarps * kTokens * rows.scale_row;
  }
  LOWBIT_INLINE void store_scales(float* to) const {
    to += scale() * kShape.scale_stride() + scale_token();
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const float of = has_float32() ? __uint_as_float(held[i]) : float_of_half(held[i]);
      if (scale_token() < kScaleEach && i * kScaleEach + scale_token() < kTokens) to[i * kScaleEach] = of * kUnitOfIntegers;
    }
  }

 private:
  LOWBIT_INLINE bool has_float32() const { return rows.scale_dtype == DType::float32; }
  // The loaded values are not used here: a lane would wait for them.
  LOWBIT_INLINE void hold_scales(int tokens) {
    const auto load = [&](const auto* from) {
#pragma unroll
      for (int i = 0; i < kHeld; i++, from += kScaleEach * rows.scale_row)
        held[i] = i * kScaleEach + scale_token() < tokens ? *from : 0;
    };
    if (has_float32()) load(static_cast<const uint32_t*>(rows.scale) + scale_from);
    else load(static_cast<const uint16_t*>(rows.scale) + scale_from);
  }
};

// The position of a column in a group of keys: lane t, a step, and one of four halves of the lane's two words.
struct KeySlot {
  int t, step, half;
};
template <DType kCache>
LOWBIT_INLINE KeySlot key_slot(int column) {
  const int i = column % 4;
  if constexpr (kCache == DType::uint8) return {column % 16 / 4, column / 16, i % 2 * 2 + i / 2};
  else if constexpr (kCache == DType::int8) return {column / 8, column % 8 / 4, i % 2 * 2 + i / 2};
  else return {column / 8, column % 8 / 4, i};
}

// The words for both steps of a key's group: [step][word].
template <DType kCache>
LOWBIT_INLINE void load_key(uint32_t (&words)[2][2], const char* group, int t) {
  if constexpr (kCache == DType::uint8) {
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(group + 4 * t);
    int4_to_bf16(codes, words[0][0], words[0][1], words[1][0], words[1][1]);
  } else if constexpr (kCache == DType::int8) {
    const uint2 codes = *reinterpret_cast<const uint2*>(group + 8 * t);
    int8_to_bf16(codes.x, words[0][0], words[0][1]), int8_to_bf16(codes.y, words[1][0], words[1][1]);
  } else {
    const uint4 all = *reinterpret_cast<const uint4*>(group + 16 * t);
    words[0][0] = all.x, words[0][1] = all.y, words[1][0] = all.z, words[1][1] = all.w;
  }
}

// The column, within its group of values, of the i-th of lane (g, t)'s four.
template <DType kCache>
LOWBIT_INLINE int value_column(int g, int i) {
  if constexpr (kCache == DType::uint8 || kCache == DType::int8) return 2 * g + i % 2 + i / 2 * 16;
  else return 8 * i + g;
}

// A group of values as the left factor, by 16 columns: [step of 16 tokens][columns].
template <DType kCache, int kSteps, int kStride>
LOWBIT_INLINE void load_values(uint32_t (&a)[kSteps][2][4], const char* values, int group) {
  constexpr int kGroupBytes = kCache == DType::uint8 ? 16 : kCache == DType::int8 ? 32 : 64;
  const int lane = lane_of_warp();
  const auto transposed = [&](uint32_t(&words)[4], int token, int byte, int bytes) {
    load_transposed(words, reinterpret_cast<const uint16_t*>(values + token * kStride + byte),
                    static_cast<uint32_t>(group * kGroupBytes + bytes));
  };
  if constexpr (kCache == DType::uint8) {
    uint32_t words[4];  // 8 tokens each; with 16 tokens per tile, repeated
    transposed(words, lane % (16 * kSteps), 0, 0);
#pragma unroll
    for (int i = 0; i < 2 * kSteps; i++) {
      uint32_t *first = a[i / 2][0] + i % 2 * 2, *second = a[i / 2][1] + i % 2 * 2;
      int4_to_bf16(words[i], first[0], first[1], second[0], second[1]);
    }
  } else {
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      uint32_t words[4];
      if constexpr (kCache == DType::int8) {
        transposed(words, lane % 16, lane / 16 * 16, step * 16 * kStride);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          uint32_t* to = a[step][i / 2] + i % 2 * 2;
          int8_to_bf16(words[i], to[0], to[1]);
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          transposed(words, lane % 16, lane / 16 * 16, step * 16 * kStride + half * 32);
#pragma unroll
          for (int i = 0; i < 4; i++) a[step][half][i] = words[i % 2 * 2 + i / 2];
        }
      }
    }
  }
}

}  // namespace lowbit::cuda
