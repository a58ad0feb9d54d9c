// SPDX-License-Identifier: Apache-2.0
// Keys and values as they are in the cache, in shared memory, and as fragments for the tensor cores: codes are
// exact in bfloat16.
//
// Of a group of 32 columns lane (g, t) takes 8 of a key, in two steps of 16 k. Of the values of four tokens (t, t + 4,
// t + 8 and t + 12) it takes four columns that lie side by side.
#pragma once

#include "cuda/decode/rotate.cuh"
#include "cuda/linear/fragments.cuh"

namespace lowbit::cuda {

// The dtype of a product's factors.
template <DType kCache>
constexpr DType kProduct = kCache == DType::float16 ? DType::float16 : DType::bfloat16;

// A pair of floats as parts of 16 bits that add up to it.
template <DType dtype, int kParts>
LOWBIT_INLINE void cut_pair(float low, float high, uint32_t (&part)[kParts]) {
  if constexpr (kParts == 1) {
    part[0] = pair_of<dtype>(low, high);
  } else if constexpr (dtype == DType::bfloat16) {  // the first cut: what is finite stays so
    const float first = upper_part(low), second = upper_part(high);
    part[0] = upper_halves(first, second), part[1] = pair_of_bf16(low - first, high - second);
  } else {
    part[0] = pair_of_f16(low, high);
    part[1] = pair_of_f16(low - float_of_half(part[0] & 0xffffu), high - float_of_half(part[0] >> 16));
  }
}

// A tile of tokens, copied by 16 bytes; zeros behind the last token and the last column.
template <int kStride>
struct TokenTile {
  alignas(16) char data[kKeyTile * kStride];

  template <int kPieces>
  LOWBIT_INLINE void copy(const CacheRows& rows, const char* from, int64_t stride, int tokens) {
#pragma unroll 1
    for (int at = static_cast<int>(threadIdx.x); at < kKeyTile * kPieces; at += kDecodeThreads) {
      const int token = at / kPieces, piece = at % kPieces;
      const bool is_there = token < tokens && piece < rows.pieces;
      copy_async(reinterpret_cast<uint16_t*>(data + token * kStride + piece * 16),
                 reinterpret_cast<const uint16_t*>(from + (is_there ? token * stride + piece * 16 : 0)), is_there);
    }
  }
  LOWBIT_INLINE const char* row(int token) const { return data + token * kStride; }
};

// Scales of a tile of tokens, which are loaded into registers ahead of their use.
template <int kScales>
struct ScalesAhead {
  static constexpr int kEach = kKeyTile * kScales / kDecodeThreads + (kKeyTile * kScales % kDecodeThreads ? 1 : 0);
  float held[kEach ? kEach : 1];

  LOWBIT_INLINE void fetch(const CacheRows& rows, int64_t first, int tokens) {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int at = i * kDecodeThreads + static_cast<int>(threadIdx.x), token = at / (kScales ? kScales : 1);
      held[i] = token < tokens ? load_real(rows.scale, rows.scale_dtype,
                                           first + token * rows.scale_row + at % (kScales ? kScales : 1))
                               : 0.0f;
    }
  }
  LOWBIT_INLINE void store(float* to) const {
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int at = i * kDecodeThreads + static_cast<int>(threadIdx.x);
      if (at < kKeyTile * kScales) to[at] = held[i];
    }
  }
};

// The place of a column of a group of keys: lane t, a step, and one of four halves of the lane's two words.
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

// The words of both steps of a key's group: [step][word].
template <DType kCache>
LOWBIT_INLINE void load_key(uint32_t (&words)[2][2], const char* group, int t) {
  if constexpr (kCache == DType::uint8) {
    const uint32_t bytes = *reinterpret_cast<const uint32_t*>(group + 4 * t);
    integers_to_bf16<4, 8>(bytes & 0x0f0f0f0fu, words[0][0], words[0][1]);
    integers_to_bf16<4, 8>(bytes >> 4 & 0x0f0f0f0fu, words[1][0], words[1][1]);
  } else if constexpr (kCache == DType::int8) {
    const uint2 bytes = *reinterpret_cast<const uint2*>(group + 8 * t);
    integers_to_bf16<8, 128>(bytes.x ^ 0x80808080u, words[0][0], words[0][1]);
    integers_to_bf16<8, 128>(bytes.y ^ 0x80808080u, words[1][0], words[1][1]);
  } else {
    const uint4 all = *reinterpret_cast<const uint4*>(group + 16 * t);
    words[0][0] = all.x, words[0][1] = all.y, words[1][0] = all.z, words[1][1] = all.w;
  }
}

// The column, in its group of values, of the i-th of lane (g, t)'s four.
template <DType kCache>
LOWBIT_INLINE int value_column(int g, int i) {
  if constexpr (kCache == DType::uint8) return 2 * g + i % 2 + i / 2 * 16;
  else return 4 * g + i;
}

// Pairs of two tokens, of four columns.
template <DType kCache>
LOWBIT_INLINE void load_values(uint32_t (&pairs)[4], const char* first, const char* second, int g) {
  if constexpr (kCache == DType::uint8) {
    const uint32_t both = *reinterpret_cast<const uint16_t*>(first + 2 * g) |
                          static_cast<uint32_t>(*reinterpret_cast<const uint16_t*>(second + 2 * g)) << 16;
    integers_to_bf16<4, 8>(both & 0x0f0f0f0fu, pairs[0], pairs[1]);
    integers_to_bf16<4, 8>(both >> 4 & 0x0f0f0f0fu, pairs[2], pairs[3]);
  } else if constexpr (kCache == DType::int8) {
    const uint32_t a = *reinterpret_cast<const uint32_t*>(first + 4 * g) ^ 0x80808080u,
                   b = *reinterpret_cast<const uint32_t*>(second + 4 * g) ^ 0x80808080u;
    integers_to_bf16<8, 128>(__byte_perm(a, b, 0x5410), pairs[0], pairs[1]);
    integers_to_bf16<8, 128>(__byte_perm(a, b, 0x7632), pairs[2], pairs[3]);
  } else {
    const uint2 a = *reinterpret_cast<const uint2*>(first + 8 * g), b = *reinterpret_cast<const uint2*>(second + 8 * g);
    pairs[0] = __byte_perm(a.x, b.x, 0x5410), pairs[1] = __byte_perm(a.x, b.x, 0x7632);
    pairs[2] = __byte_perm(a.y, b.y, 0x5410), pairs[3] = __byte_perm(a.y, b.y, 0x7632);
  }
}

}  // namespace lowbit::cuda
