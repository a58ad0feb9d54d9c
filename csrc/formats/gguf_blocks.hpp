// SPDX-License-Identifier: Apache-2.0
// The block types of GGUF, but for MXFP4: w = scale * code + minimum, or scale * (code - zero) with the zero point of the
// symmetric format where a type has no minimums. A block is `weights` neighbours of a row in `bytes` bytes, and has a
// scale for each `group` of them.
//
//   products    a scale is the product of a float16 and a small integer; else it is a float16
//   minimums    each group has a minimum, as its scale is
//   read(block, to)   writes codes, scales and minimums of a block
#pragma once

#include <cstring>

#include "formats/format.hpp"

namespace lowbit {

struct GroupNumbers {
  uint8_t* codes;
  float *scale, *minimum;
};

namespace {

LOWBIT_INLINE float half_at(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return float_from_float16(bits);
}

// `count` bytes as 2 * count codes: the low nibbles, then the high ones.
template <int count>
LOWBIT_INLINE void nibbles(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < count; i++) codes[i] = from[i] & 15;
  for (int i = 0; i < count; i++) codes[count + i] = from[i] >> 4;
}

// The fields of kBits bits of 32 bytes, lowest first, 32 codes for each: their bits from `place` on.
template <int kBits, int place>
LOWBIT_INLINE void add_fields(const uint8_t* from, uint8_t* codes) {
  for (int field = 0; field < 8 / kBits; field++)
    for (int i = 0; i < 32; i++)
      codes[32 * field + i] |= static_cast<uint8_t>((from[i] >> (kBits * field) & ((1 << kBits) - 1)) << place);
}

// The fifth bits of 32 codes, in 4 bytes.
LOWBIT_INLINE void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
  for (int i = 0; i < 32; i++) codes[i] |= static_cast<uint8_t>((from[i / 8] >> i % 8 & 1) << 4);
}

// 8 scales and 8 minimums of 6 bits in 12 bytes, times two float16 before them.
LOWBIT_INLINE void six_bits(const uint8_t* block, GroupNumbers to) {
  const float scale = half_at(block), minimum = -half_at(block + 2);
  const uint8_t *first = block + 4, *second = block + 8, *both = block + 12;
  for (int i = 0; i < 4; i++) {
    to.scale[i] = scale * static_cast<float>(first[i] & 63);
    to.scale[i + 4] = scale * static_cast<float>((both[i] & 15) | (first[i] >> 2 & 48));
    to.minimum[i] = minimum * static_cast<float>(second[i] & 63);
    to.minimum[i + 4] = minimum * static_cast<float>(both[i] >> 4 | (second[i] >> 2 & 48));
  }
}

// The levels of IQ4, as int8.
LOWBIT_INLINE void iq4(const uint8_t* from, uint8_t* codes) {
  constexpr uint8_t level[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
  for (int i = 0; i < 16; i++) codes[i] = level[from[i] & 15], codes[i + 16] = level[from[i] >> 4];
}

template <Format kFormat, int kGroup, int kWeights, int kBytes, bool kProducts, bool kMinimums>
struct BlockType {
  static constexpr Format format = kFormat;
  static constexpr int group = kGroup, weights = kWeights, bytes = kBytes;
  static constexpr bool products = kProducts, minimums = kMinimums;
};

struct Q4_0 : BlockType<Format::int4, 32, 32, 18, false, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    nibbles<16>(block + 2, to.codes);
    *to.scale = half_at(block);
  }
};

struct Q4_1 : BlockType<Format::int4, 32, 32, 20, false, true> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    nibbles<16>(block + 4, to.codes);
    *to.scale = half_at(block), *to.minimum = half_at(block + 2);
  }
};

struct Q5_0 : BlockType<Format::int5, 32, 32, 22, false, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    nibbles<16>(block + 6, to.codes);
    add_fifth_bits(block + 2, to.codes);
    *to.scale = half_at(block);
  }
};

struct Q5_1 : BlockType<Format::int5, 32, 32, 24, false, true> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    nibbles<16>(block + 8, to.codes);
    add_fifth_bits(block + 4, to.codes);
    *to.scale = half_at(block), *to.minimum = half_at(block + 2);
  }
};

struct Q8_0 : BlockType<Format::int8, 32, 32, 34, false, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    for (int i = 0; i < 32; i++) to.codes[i] = block[2 + i] ^ 128;
    *to.scale = half_at(block);
  }
};

struct Q2_K : BlockType<Format::int2, 16, 256, 84, true, true> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    std::memset(to.codes, 0, weights);
    add_fields<2, 0>(block + 16, to.codes), add_fields<2, 0>(block + 48, to.codes + 128);
    const float scale = half_at(block + 80), minimum = -half_at(block + 82);
    for (int i = 0; i < 16; i++)
      to.scale[i] = scale * static_cast<float>(block[i] & 15), to.minimum[i] = minimum * static_cast<float>(block[i] >> 4);
  }
};

struct Q3_K : BlockType<Format::int3, 16, 256, 110, true, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    std::memset(to.codes, 0, weights);
    add_fields<2, 0>(block + 32, to.codes), add_fields<2, 0>(block + 64, to.codes + 128);
    add_fields<1, 2>(block, to.codes);
    const float scale = half_at(block + 108);
    for (int i = 0; i < 16; i++) {
      const int low = block[96 + i % 8] >> i / 8 * 4 & 15, high = block[104 + i % 4] >> i / 4 * 2 & 3;
      to.scale[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
};

struct Q4_K : BlockType<Format::int4, 32, 256, 144, true, true> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    for (int i = 0; i < 4; i++) nibbles<32>(block + 16 + 32 * i, to.codes + 64 * i);
    six_bits(block, to);
  }
};

struct Q5_K : BlockType<Format::int5, 32, 256, 176, true, true> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    for (int i = 0; i < 4; i++) nibbles<32>(block + 48 + 32 * i, to.codes + 64 * i);
    add_fields<1, 4>(block + 16, to.codes);
    six_bits(block, to);
  }
};

struct Q6_K : BlockType<Format::int6, 16, 256, 210, true, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    nibbles<64>(block, to.codes), nibbles<64>(block + 64, to.codes + 128);
    add_fields<2, 4>(block + 128, to.codes), add_fields<2, 4>(block + 160, to.codes + 128);
    const float scale = half_at(block + 208);
    for (int i = 0; i < 16; i++) to.scale[i] = scale * static_cast<float>(static_cast<int8_t>(block[192 + i]));
  }
};

struct IQ4_NL : BlockType<Format::int8, 32, 32, 18, false, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    iq4(block + 2, to.codes);
    *to.scale = half_at(block);
  }
};

struct IQ4_XS : BlockType<Format::int8, 32, 256, 136, true, false> {
  LOWBIT_INLINE static void read(const uint8_t* block, GroupNumbers to) {
    const float scale = half_at(block);
    for (int i = 0; i < 8; i++) {
      iq4(block + 8 + 16 * i, to.codes + 32 * i);
      const int low = block[4 + i / 2] >> i % 2 * 4 & 15, high = block[2 + i / 4] >> i % 4 * 2 & 3;
      to.scale[i] = scale * static_cast<float>((low | high << 4) - 32);
    }
  }
};

}  // namespace

#define LOWBIT_GGUF_TYPES(X) \
  X(Q4_0) X(Q4_1) X(Q5_0) X(Q5_1) X(Q8_0) X(Q2_K) X(Q3_K) X(Q4_K) X(Q5_K) X(Q6_K) X(IQ4_NL) X(IQ4_XS)

#define LOWBIT_GGUF_TYPE(name) name,
enum class GgufType : int { LOWBIT_GGUF_TYPES(LOWBIT_GGUF_TYPE) };
#undef LOWBIT_GGUF_TYPE
#define LOWBIT_GGUF_TYPE(name) #name,
inline constexpr std::string_view kGgufTypeNames[] = {LOWBIT_GGUF_TYPES(LOWBIT_GGUF_TYPE)};
#undef LOWBIT_GGUF_TYPE

// Calls body.operator()<Type>() for a type known at run time only.
template <class Body>
LOWBIT_ALWAYS_INLINE auto with_gguf_type(GgufType type, Body&& body) {
  switch (type) {
#define LOWBIT_GGUF_TYPE(name) \
  case GgufType::name: return body.template operator()<lowbit::name>();
    LOWBIT_GGUF_TYPES(LOWBIT_GGUF_TYPE)
#undef LOWBIT_GGUF_TYPE
  }
  __builtin_unreachable();
}

}  // namespace lowbit
