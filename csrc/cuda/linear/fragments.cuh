// SPDX-License-Identifier: Apache-2.0
// A lane's weights of a tile: two columns, and in each chunk of 16 k the four of its t. As bytes, or as parts of
// bfloat16 in the order of call.hpp.
#pragma once

#include "cuda/device/mma.cuh"
#include "gpu/linear/activations.cuh"

namespace lowbit::cuda {

// Where a tile is: in global memory, where it is read once, or in shared memory.
struct FromGlobal {
  template <class Word>
  LOWBIT_INLINE static Word word(const uint8_t* p) { return load_once(reinterpret_cast<const Word*>(p)); }
};
struct FromShared {
  template <class Word>
  LOWBIT_INLINE static Word word(const uint8_t* p) { return *reinterpret_cast<const Word*>(p); }
};

// Codes of 1 to 8 bits, stored in planes (formats/codec.hpp): the rows of each plane that this lane reads.
template <int kBits>
struct LaneCodes {
  template <int kCount>
  static constexpr int rows = kBits & kCount ? kCount < 4 ? 1 : kCount / 2 : 0;
  static constexpr int kWords = 2 * (rows<1> + rows<2> + rows<4> + rows<8>);
  uint2 one[rows<1> + 1], two[rows<2> + 1], four[rows<4> + 1], eight[rows<8> + 1];  // the last of each is unused

  template <class From>
  LOWBIT_INLINE void load(const uint8_t* tile, int g, int t) {
    load_plane<1, From>(tile, g, t % 2, one), load_plane<2, From>(tile, g, t, two);
    load_plane<4, From>(tile, g, t, four), load_plane<8, From>(tile, g, t, eight);
  }
  // Four codes of column 2g + `column`, for k from 16 q + 4 t on.
  LOWBIT_INLINE uint32_t bytes(int q, int column, int t) const {
    const auto of = [column](const uint2& word) { return column ? word.y : word.x; };
    uint32_t codes = 0;
    if constexpr (kBits & 1) codes |= of(one[0]) >> (2 * q + t / 2) & 0x01010101u;
    if constexpr (kBits & 2) codes |= (of(two[0]) >> 2 * q & 0x03030303u) << bits_before_piece(kBits, 2);
    if constexpr (kBits & 4) codes |= (of(four[q % 2]) >> 4 * (q / 2) & 0x0f0f0f0fu) << bits_before_piece(kBits, 4);
    if constexpr (kBits & 8) codes |= of(eight[q]);
    return codes;
  }

 private:
  template <int kCount, class From, int kRows>
  LOWBIT_INLINE static void load_plane(const uint8_t* tile, int g, int first_row, uint2 (&out)[kRows]) {
    const uint8_t* plane = tile + bits_before_piece(kBits, kCount) * 128 + first_row * 64 + g * 8;
#pragma unroll
    for (int i = 0; i < rows<kCount>; i++) out[i] = From::template word<uint2>(plane + i * 256);
  }
};

// Codes of a symmetric format minus its zero, four at once: no byte borrows from the next.
template <Format kFormat>
LOWBIT_INLINE uint32_t signed_bytes(uint32_t codes) {
  constexpr uint32_t kSigns = 0x80808080u;
  if constexpr (bits(kFormat) == 8) return codes ^ kSigns;
  else return ((codes | kSigns) - symmetric_zero(kFormat) * 0x01010101u) ^ kSigns;
}

// float8_e4m3: shifts exponent and mantissa to their position in bfloat16; the values are multiplied by 2^120.
LOWBIT_INLINE void float8_to_bf16(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  const auto convert = [](uint32_t halves) {
    const uint32_t placed = (halves & 0x007f007fu) << 4 | (halves & 0x00800080u) << 8;
    return fma_bf16x2(placed, 0x7b807b80u, 0x80008000u);
  };
  even = convert(bytes & 0x00ff00ffu), odd = convert(bytes >> 8 & 0x00ff00ffu);
}

// The number of bfloat16 parts that represent every value of a format before scaling.
template <Format kFormat>
constexpr int kWeightParts = (codec_of<kFormat>::significant_bits + 7) / 8;

// Parts of the 16 levels of a lookup format, in shared memory: 8 bytes each, so that all 16 are in different banks.
struct LevelParts {
  uint32_t first, last;  // parts 0 and 1; part 2
};

template <Format kFormat>
LOWBIT_INLINE void write_levels(LevelParts (&table)[16]) {
  if (threadIdx.x >= 16) return;
  float part[kMaxParts];
  cut(codec_of<kFormat>::level(static_cast<int>(threadIdx.x)), part);
  table[threadIdx.x] = {upper_halves(part[0], part[1]), upper_halves(part[2], 0.0f)};
}

// A tile of a format as read by the lane, and its chunks as fragments: a[part][...] of k-pairs of both columns.
template <Format kFormat>
struct LaneTile {
  using Codec = codec_of<kFormat>;
  static constexpr bool kCodes = !is_float(kFormat), kRows32 = kFormat == Format::float32,
                        kRows16 = kFormat == Format::bfloat16 || kFormat == Format::float16;
  static constexpr int kBits = Codec::bits, kParts = kWeightParts<kFormat>;
  struct Floats {
    static constexpr int kRows = kRows32 ? 16 : 8;
    uint2 row[kRows];  // bfloat16: two k; float32: one; float16: one each in x and y
  };
  struct OtherFloats { float value[2][16]; };
  using FloatWords = std::conditional_t<kRows32 || kRows16, Floats, OtherFloats>;
  std::conditional_t<kCodes, LaneCodes<kCodes ? kBits : 8>, FloatWords> words;

  template <class From = FromGlobal>
  LOWBIT_INLINE void load(const uint8_t* tile, int g, int t) {
    if constexpr (kCodes) {
      words.template load<From>(tile, g, t);
    } else if constexpr (kFormat == Format::float16) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const uint8_t* row = tile + (i / 2 * 16 + t * 4 + i % 2 * 2) * 32 + g * 4;
        words.row[i] = {From::template word<uint32_t>(row), From::template word<uint32_t>(row + 32)};
      }
    } else if constexpr (kRows32 || kRows16) {
      constexpr int kRowK = 32 / kBits, kEach = 4 / kRowK;  // k per row; rows per lane and chunk
#pragma unroll
      for (int i = 0; i < Floats::kRows; i++) {
        const int row = (i / kEach * 16 + t * 4) / kRowK + i % kEach;
        words.row[i] = From::template word<uint2>(tile + row * 64 + g * 8);
      }
    } else {  // one by one, at the codec's positions
#pragma unroll
      for (int i = 0; i < 32; i++) {
        const uint8_t* code = tile + Codec::position(2 * g + i % 2, i / 8 * 16 + t * 4 + i / 2 % 4);
        words.value[i % 2][i / 2] = Codec::decode(*reinterpret_cast<const typename Codec::Code*>(code));
      }
    }
  }

  // Four weights of column 2g + `column`, for k from 16 q + 4 t on: for codes, the levels before zero point and scale.
  // A table is read from shared memory.
  LOWBIT_INLINE void levels(int q, int column, int t, const float* table, float (&level)[4]) const {
    if constexpr (!kCodes) {
#pragma unroll
      for (int i = 0; i < 4; i++) level[i] = value(q, column, i);
    } else {
      const uint32_t bytes = words.bytes(q, column, t);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if constexpr (is_integer(kFormat))  // in the low mantissa bits of 2^23: a conversion takes four times as long
          level[i] = __uint_as_float(__byte_perm(bytes, 0x4b000000u, 0x7440u + i)) - 0x1p23f;
        else if constexpr (is_table(kFormat)) level[i] = table[bytes >> 8 * i & 15];
        else level[i] = Codec::level(static_cast<int>(bytes >> 8 * i & 0xff));
      }
    }
  }

  // kCount: the number of parts, all that a format has, or the first ones of a lookup format.
  template <int kCount>
  LOWBIT_INLINE void fragments(int q, int t, const LevelParts* levels, uint32_t (&a)[kCount][4]) const {
    static_assert(kCount == kParts || (is_table(kFormat) && kCount < kParts));
#pragma unroll
    for (int column = 0; column < 2; column++) {
      if constexpr (!kCodes) {
        floats(q, column, a);
      } else {
        constexpr int kZero = is_integer(kFormat) ? symmetric_zero(kFormat) : 0;
        const uint32_t bytes = words.bytes(q, column, t);
        if constexpr (kBits == 4 && is_integer(kFormat)) {
          const uint32_t word = of_column(words.four[q % 2], column), shift = q / 2 * 4;
          a[0][column] = units_to_bf16<kZero>(word & 0x000f000fu << shift, shift);
          a[0][2 + column] = units_to_bf16<kZero>(word >> 8 & 0x000f000fu << shift, shift);
        } else if constexpr (is_integer(kFormat)) {
          a[0][column] = units_to_bf16<kZero>(bytes & 0x00ff00ffu);
          a[0][2 + column] = units_to_bf16<kZero>(bytes >> 8 & 0x00ff00ffu);
        } else if constexpr (kFormat == Format::fp8_e4m3) float8_to_bf16(bytes, a[0][column], a[0][2 + column]);
        else if constexpr (is_table(kFormat)) look_up(bytes, column, levels, a);
        else cut_four([bytes](int i) { return Codec::level(static_cast<int>(bytes >> 8 * i & 0xff)); }, column, a);
      }
    }
  }

 private:
  LOWBIT_INLINE static uint32_t of_column(const uint2& word, int column) { return column ? word.y : word.x; }

  // Weight `i` of four, for a float format.
  LOWBIT_INLINE float value(int q, int column, int i) const {
    if constexpr (kRows32) {
      return __uint_as_float(of_column(words.row[4 * q + i], column));
    } else if constexpr (kFormat == Format::bfloat16) {
      const uint32_t pair = of_column(words.row[2 * q + i / 2], column);
      return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    } else if constexpr (kRows16) {
      const uint2& pair = words.row[2 * q + i / 2];
      return float_of_half((i % 2 ? pair.y : pair.x) >> 16 * column);
    } else {
      return words.value[column][4 * q + i];
    }
  }

  template <int kCount>
  LOWBIT_INLINE void floats(int q, int column, uint32_t (&a)[kCount][4]) const {
    if constexpr (kFormat == Format::bfloat16)
      a[0][column] = of_column(words.row[2 * q], column), a[0][2 + column] = of_column(words.row[2 * q + 1], column);
    else cut_four([&](int i) { return value(q, column, i); }, column, a);
  }

  // value(i): the i-th of four k of a column.
  template <class Value, int kCount>
  LOWBIT_INLINE static void cut_four(Value&& value, int column, uint32_t (&a)[kCount][4]) {
    float part[4][kCount];
#pragma unroll
    for (int i = 0; i < 4; i++) cut(value(i), part[i]);
#pragma unroll
    for (int j = 0; j < kCount; j++)
      a[j][column] = upper_halves(part[0][j], part[1][j]), a[j][2 + column] = upper_halves(part[2][j], part[3][j]);
  }

  template <int kCount>
  LOWBIT_INLINE static void look_up(uint32_t bytes, int column, const LevelParts* levels, uint32_t (&a)[kCount][4]) {
    LevelParts of[4];
#pragma unroll
    for (int i = 0; i < 4; i++) of[i] = levels[bytes >> 8 * i & 15];
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
      const LevelParts &low = of[pair], &high = of[2 + pair];
      a[0][2 * pair + column] = __byte_perm(low.first, high.first, 0x5410);
      if constexpr (kCount > 1) a[1][2 * pair + column] = __byte_perm(low.first, high.first, 0x7632);
      if constexpr (kCount > 2) a[2][2 * pair + column] = __byte_perm(low.last, high.last, 0x5410);
    }
  }
};

// A lane's share of a tile in flight: codes, and scales and zero points (float16) of two columns. kTileGroups: scales
// along the k of a tile; 0: one for all k, and no zero points.
template <Format kFormat, int kTileGroups, bool kAsymmetric>
struct TileAhead {
  static constexpr int kScales = kTileGroups ? kTileGroups : 1;
  LaneTile<kFormat> tile;
  uint32_t scale[kScales], zero[kScales];

  LOWBIT_INLINE void load(const LinearCall& call, const uint8_t* panel, int at, int g, int t) {
    tile.load(panel + call.sections.codes + at * (128 * codec_of<kFormat>::bits), g, t);
    if constexpr (kTileGroups > 0)
#pragma unroll
      for (int part = 0; part < kScales; part++) {
        const int of_tile = at * kScales + part >> call.group_shift, last = call.groups - 1,
                  group = of_tile < last ? of_tile : last;
        const auto pair = [&](int64_t section) {
          return *reinterpret_cast<const uint32_t*>(panel + section + (group * 16 + 2 * g) * 2);
        };
        scale[part] = call.spec.group_size ? pair(call.sections.group_scale) : 0x3c003c00u;
        if constexpr (kAsymmetric) zero[part] = pair(call.sections.zero);
      }
  }
};

}  // namespace lowbit::cuda
