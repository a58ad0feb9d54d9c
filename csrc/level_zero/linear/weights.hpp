// SPDX-License-Identifier: Apache-2.0
// A tile of a weight, 16 columns x 64 k, as the second factor of products, which takes rows of the packed layout as
// they are, a dword of four codes (or two bfloat16) per column. With 16 lanes, lane l has column l; with 8, columns l
// and l + 8.
#pragma once

#include "level_zero/device/matrix.hpp"
#include "level_zero/linear/levels.hpp"

namespace lowbit::level_zero {

constexpr int kSides = static_cast<int>(kPanelColumns) / kLanes;  // columns per lane

// Rows of 64 bytes: one dword of each row, for each column of this lane.
template <class Rows>
struct Words {
  Rows side[kSides];
};

template <class Rows>
LOWBIT_INLINE Words<Rows> words_of(Rows left, Rows right) {
  Words<Rows> words;
  words.side[0] = left, words.side[kSides - 1] = right;  // equal if there is one side
  return words;
}

LOWBIT_INLINE Words<u32x8> load_words(const uint8_t* from) {
  if constexpr (kSides == 1) {
    return {{block_read8(global<uint32_t>(from))}};
  } else {
    const u32x8 upper = block_read8(global<uint32_t>(from)), lower = block_read8(global<uint32_t>(from + 256));
    return words_of<u32x8>(__builtin_shufflevector(upper, lower, 0, 2, 4, 6, 8, 10, 12, 14),
                           __builtin_shufflevector(upper, lower, 1, 3, 5, 7, 9, 11, 13, 15));
  }
}
LOWBIT_INLINE Words<u32x4> load_four(const uint8_t* from) {
  if constexpr (kSides == 1) return {{block_read4(global<uint32_t>(from))}};
  const u32x8 rows = block_read8(global<uint32_t>(from));
  return words_of<u32x4>(rows.even, rows.odd);
}
LOWBIT_INLINE Words<u32x2> load_two(const uint8_t* from) {
  if constexpr (kSides == 1) return {{block_read2(global<uint32_t>(from))}};
  const u32x4 rows = block_read4(global<uint32_t>(from));
  return words_of<u32x2>(rows.even, rows.odd);
}

// 16 k of a column: pairs of bfloat16, for each part.
struct Chunk {
  u32x8 part[gpu::kMaxParts];
};

// Codes of a tile, or of half a tile if they are bytes: the rows of its planes of 8 or 4 bits, 2 bits and 1 bit
// (formats/codec.hpp). Empty for floats, which are read when they are multiplied.
struct Codes {
  Words<u32x8> whole;
  Words<u32x4> two;
  Words<u32x2> one;

  LOWBIT_INLINE static bool of_half() { return code_bits() == 8; }

  LOWBIT_INLINE void load(const uint8_t* tile, int half) {
    const int count = code_bits();
    if (count > 8) return;
    if (count == 8) {
      whole = load_words(tile + half * 512);
    } else {
      if (count & 1) one = load_two(tile);
      if (count & 2) two = load_four(tile + (count & 1) * 128);
      if (count & 4) whole = load_words(tile + (count & 3) * 128);
    }
  }
  // The codes for 32 k of a column, four per word.
  LOWBIT_INLINE u32x8 bytes(int side, int half) const {
    constexpr u32x8 kOne = {0, 0, 1, 1, 2, 2, 3, 3}, kTwo = {0, 0, 0, 0, 2, 2, 2, 2};
    const int count = code_bits();
    const uint32_t from = 4 * half;
    if (count == 8) return whole.side[side];
    u32x8 codes = 0;
    if (count & 1) {
      const u32x2 rows = one.side[side];
      codes |= __builtin_shufflevector(rows, rows, 0, 1, 0, 1, 0, 1, 0, 1) >> (kOne + from) & 0x01010101u;
    }
    if (count & 2) {
      const u32x4 rows = two.side[side];
      codes |= (__builtin_shufflevector(rows, rows, 0, 1, 2, 3, 0, 1, 2, 3) >> (kTwo + from) & 0x03030303u)
               << static_cast<uint32_t>(count & 1);
    }
    if (count & 4) codes |= (whole.side[side] >> from & 0x0f0f0f0fu) << static_cast<uint32_t>(count & 3);
    return codes;
  }
};

LOWBIT_INLINE u32x8 interleaved(u32x4 even, u32x4 odd) {
  return __builtin_shufflevector(even, odd, 0, 4, 1, 5, 2, 6, 3, 7);
}
// The upper 16 bits of floats, packed.
template <int count>
LOWBIT_INLINE Vector<uint32_t, count> upper_halves(Vector<uint32_t, count> low, Vector<uint32_t, count> high) {
  return low >> 16 | (high & 0xffff0000u);
}
LOWBIT_INLINE u32x4 bits_of_floats(Vector<float, 4> a) { return __builtin_bit_cast(u32x4, a); }

// Integers minus the zero point of a symmetric weight, exact in bfloat16: from one byte of each word.
LOWBIT_INLINE u32x4 integers(u32x4 words, int byte) {
  return bits_of_floats(__builtin_convertvector(words >> 8 * byte & 0xffu, Vector<float, 4>) -
                        static_cast<float>(zero_of_symmetric()));
}

// float8_e4m3: shifts exponent and mantissa to their position in float32, below the bits of a larger exponent; the
// values are multiplied by 2^8 (formats/fp8_e4m3.hpp).
LOWBIT_INLINE u32x4 float8(u32x4 words, int byte) {
  const u32x4 codes = words >> 8 * byte;
  const auto u = __builtin_bit_cast(Vector<float, 4>, (codes & 0x7fu) << 20 | (uint32_t{112} << 23));
  const Vector<float, 4> twice = u * 2.0f - 0x1p-14f, level = (u < twice ? u : twice) * 256.0f;
  return bits_of_floats(level) | (codes & 0x80u) << 24;
}

LOWBIT_INLINE void look_up(u32x4 words, const LevelParts* levels, u32x8 (&part)[gpu::kMaxParts]) {
  const bool one_part = weight_parts() == 1;
#pragma unroll
  for (int i = 0; i < 8; i++) {  // two k each
    const uint32_t codes = words[i / 2] >> i % 2 * 16;
    const LevelParts &low = levels[codes & 15], &high = levels[codes >> 8 & 15];
    part[0][i] = (low.first & 0xffffu) | high.first << 16;
    if (one_part) continue;
    part[1][i] = low.first >> 16 | (high.first & 0xffff0000u);
    part[2][i] = (low.last & 0xffffu) | high.last << 16;
  }
}

// Floats of even and odd k, cut into parts.
LOWBIT_INLINE void cut_pairs(f32x8 even, f32x8 odd, u32x8 (&part)[gpu::kMaxParts]) {
#pragma unroll
  for (int i = 0; i < gpu::kMaxParts; i++) {
    const auto low = __builtin_bit_cast(u32x8, even), high = __builtin_bit_cast(u32x8, odd);
    part[i] = upper_halves<8>(low, high);
    even -= __builtin_bit_cast(f32x8, low & 0xffff0000u), odd -= __builtin_bit_cast(f32x8, high & 0xffff0000u);
  }
}

LOWBIT_INLINE void float32_chunk(const uint8_t* from, Chunk (&chunk)[kSides]) {
  const Words<u32x8> first = load_words(from), second = load_words(from + 512);
#pragma unroll
  for (int side = 0; side < kSides; side++) {
    const u32x8 a = first.side[side], b = second.side[side];
    cut_pairs(__builtin_bit_cast(f32x8, __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)),
              __builtin_bit_cast(f32x8, __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)), chunk[side].part);
  }
}

LOWBIT_INLINE f32x8 floats_of_halves(u16x8 halves) {
  return __builtin_convertvector(__builtin_bit_cast(Vector<_Float16, 8>, halves), f32x8);
}

LOWBIT_INLINE void float16_chunk(const uint8_t* from, Chunk (&chunk)[kSides]) {
  const auto read = [from](int at) { return block_read8_16(global<uint16_t>(from + at)); };
  if constexpr (kSides == 1) {
    const u16x8 a = read(0), b = read(256);
    cut_pairs(floats_of_halves(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14)),
              floats_of_halves(__builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)), chunk[0].part);
  } else {  // columns l and l + 8 for each k
    const u16x8 a = read(0), b = read(128), c = read(256), d = read(384);
    const u16x8 even_ab = __builtin_shufflevector(a, b, 0, 4, 8, 12, 1, 5, 9, 13),
                odd_ab = __builtin_shufflevector(a, b, 2, 6, 10, 14, 3, 7, 11, 15),
                even_cd = __builtin_shufflevector(c, d, 0, 4, 8, 12, 1, 5, 9, 13),
                odd_cd = __builtin_shufflevector(c, d, 2, 6, 10, 14, 3, 7, 11, 15);
    cut_pairs(floats_of_halves(__builtin_shufflevector(even_ab, even_cd, 0, 1, 2, 3, 8, 9, 10, 11)),
              floats_of_halves(__builtin_shufflevector(odd_ab, odd_cd, 0, 1, 2, 3, 8, 9, 10, 11)), chunk[0].part);
    cut_pairs(floats_of_halves(__builtin_shufflevector(even_ab, even_cd, 4, 5, 6, 7, 12, 13, 14, 15)),
              floats_of_halves(__builtin_shufflevector(odd_ab, odd_cd, 4, 5, 6, 7, 12, 13, 14, 15)),
              chunk[kSides - 1].part);
  }
}

// A chunk of a float weight.
LOWBIT_INLINE void float_chunk(const uint8_t* from, Chunk (&chunk)[kSides]) {
  if (!has_bfloat16()) {
    if (code_bits() == 32) float32_chunk(from, chunk);
    else float16_chunk(from, chunk);
    return;
  }
  const Words<u32x8> words = load_words(from);
#pragma unroll
  for (int side = 0; side < kSides; side++) chunk[side].part[0] = words.side[side];
}

// One column of codes: four words of a half tile.
LOWBIT_INLINE Chunk chunk_of(u32x4 words, const LevelParts* levels) {
  Chunk chunk;
  if (has_levels())
    look_up(words, levels, chunk.part);
  else if (has_float8())
    chunk.part[0] = interleaved(upper_halves<4>(float8(words, 0), float8(words, 1)),
                                upper_halves<4>(float8(words, 2), float8(words, 3)));
  else
    chunk.part[0] = interleaved(upper_halves<4>(integers(words, 0), integers(words, 1)),
                                upper_halves<4>(integers(words, 2), integers(words, 3)));
  return chunk;
}

// Calls body(first side, count of sides, chunks) for chunk `which` of a half tile: both sides at once for floats; one
// after the other for codes, which takes fewer registers.
template <class Body>
LOWBIT_INLINE void for_chunks(const Codes& codes, const uint8_t* tile, int half, int which, const LevelParts* levels,
                              Body&& body) {
  if (has_floats()) {
    Chunk chunk[kSides];
    float_chunk(tile + (half * 2 + which) * (code_bits() * 32), chunk);
    body(0, kSides, chunk);
  } else {
#pragma unroll
    for (int side = 0; side < kSides; side++) {
      const u32x8 bytes = codes.bytes(side, half);
      const Chunk chunk = chunk_of(which ? bytes.hi : bytes.lo, levels);
      body(side, 1, &chunk);
    }
  }
}

}  // namespace lowbit::level_zero
