// SPDX-License-Identifier: Apache-2.0
// Floats cut into parts of 8 bits that add up to them, as the tile unit multiplies them (tiled_floats.hpp): weights of a
// panel, and rows of activations.
#pragma once

#include "cpu/linear/tiled.hpp"
#include "cpu/linear/fma.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kPartK = 32, kPartTile = TileUnit::kRows * 64;  // bfloat16 per row of a tile; bytes of a tile
constexpr int kMaxParts = 3;

// The number of 8-bit parts that represent every value of a format before scaling.
LOWBIT_INLINE constexpr int parts_of(Format format) { return (significant_bits(format) + 7) / 8; }

// The k of value i, counted from the first k of its unit; and the inverse.
template <Format kFormat>
constexpr int64_t k_of_value(int i) {
  using U = Unit<kFormat>;
  return k_in_tile<kFormat>(i / U::kValues, i % U::kValues);
}
template <Format kFormat>
constexpr int value_of_k(int64_t k) {
  int i = 0;
  while (k_of_value<kFormat>(i) != k) i++;
  return i;
}

// The parts of the values of 16 codes, minus the zero point of a symmetric weight. Stored twice: the look-up
// takes five bits.
template <Format kFormat>
struct PartTable {
  static constexpr int kParts = parts_of(kFormat);
  alignas(64) uint16_t part[kParts][32];
  consteval PartTable() : part() {
    for (int code = 0; code < 32; code++) {
      float rest = static_cast<float>(codec_of<kFormat>::level(code % 16) - codec_of<kFormat>::zero);
      for (auto& words : part) {
        const uint32_t upper = __builtin_bit_cast(uint32_t, rest) & 0xffff0000;
        words[code] = static_cast<uint16_t>(upper >> 16);
        rest -= __builtin_bit_cast(float, upper);
      }
    }
  }
};
template <Format kFormat> constexpr PartTable<kFormat> kPartTable{};

// Whether codes are converted to bfloat16 by a look-up of two at a time. The pairs are then k 0, 2 and 1, 3
// of each four.
LOWBIT_INLINE bool looks_up_parts(const WeightSpec& spec) { return bits(spec.format) == 4 && !spec.asymmetric; }

// Whether weights are multiplied by the scales of their groups before they are cut, exactly: the codes of some formats
// times float16 have 16 bits, two parts. One sum then has all of k. The tile unit takes 128 cycles for 32 x 32 sums of
// 32 k in two parts, and 360 for them in one part with a sum per group, which leaves the unit each time.
LOWBIT_INLINE bool scales_weights(const WeightSpec& spec, XFormat x_format, DType dtype, int64_t rows) {
  return !TileUnit::kSumsInRegisters && x_format == XFormat::floating && dtype == DType::bfloat16 && !spec.asymmetric &&
         spec.group_size && spec.group_size < 128 && significant_bits(spec.format) + 11 <= 16 && rows >= 8 * kTileRows;
}

// Reorders x to match these pairs.
LOWBIT_INLINE void swap_inner(uint16_t (&x)[kPartK]) {
  for (int64_t k = 0; k < kPartK; k += 4) {
    const uint16_t one = x[k + 1];
    x[k + 1] = x[k + 2], x[k + 2] = one;
  }
}

// cut_panel for 4-bit codes: with one part 7 operations for 128 values, as many as other formats take for 16.
template <Format kFormat>
void look_up_parts(const uint8_t* codes, int64_t tiles, uint8_t* out) {
  constexpr int kParts = parts_of(kFormat);
  for (; tiles; tiles--, out += 2 * kParts * kPartTile)
    for (int64_t unit = 0; unit < 8; unit++, codes += 64) {
      __builtin_prefetch(codes + 4096);
      const i32x16 words = load_i32(reinterpret_cast<const int32_t*>(codes));
      unroll<4>([&](auto nibble) {
        const i32x16 index = shift_right<4 * nibble>(words);
        unroll<kParts>([&](auto part) {
          uint8_t* pairs = out + (nibble % 2 * kParts + part) * kPartTile + unit * 128 + nibble / 2 * 64;
          store_i32(reinterpret_cast<int32_t*>(pairs), lookup32_u16(kPartTable<kFormat>.part[part], index));
        });
      });
    }
}

// The values of `length` k of a panel from k on, in parts: tiles of 32 k, [k / 32][part]. kScaled: with the scales of
// their groups.
template <Format kFormat, bool kScaled>
void cut_panel(const WeightSpec& spec, const PanelView& view, int64_t begin, int64_t length, uint8_t* out) {
  using U = Unit<kFormat>;
  constexpr int kParts = kScaled ? 2 : parts_of(kFormat);
  constexpr int kUnits = U::kValues == 1 ? 2 : 1, kCount = kUnits * U::kValues;  // whole pairs
  if constexpr (bits(kFormat) == 4 && !kScaled)
    if (looks_up_parts(spec))
      return look_up_parts<kFormat>(view.codes + begin / kTileK * spec.tile_bytes(), ceil_div(length, kTileK), out);
  alignas(64) uint8_t unpacked[kByteTile];
  for (int64_t tile = 0; tile < length; tile += kTileK) {
    const uint8_t* codes = readable_tiles<kFormat>(spec, view, (begin + tile) / kTileK, 1, unpacked);
    // In each half value = number read + offset. Only the remainder of a zero point, 0 if chosen here, is multiplied by
    // a sum of x: it could cancel what the codes have added.
    f32x16 offset[2], scale[2];
    for (int half = 0; half < 2; half++) {
      const int64_t g = spec.group_size ? (begin + tile + half * kHalfK) / spec.group_size : 0;
      const f32x16 zero = zero_of<kFormat>(view, smaller(g, spec.groups() - 1));
      offset[half] = sub(set1(value_zero<kFormat>(view)), whole_zero(view, zero, U::code_max));
      scale[half] = kScaled ? scale_of(view, smaller(g, spec.groups() - 1)) : set1(1.0f);
      if (kScaled) offset[half] = mul(offset[half], scale[half]);
    }
    for (int64_t unit = 0; unit < U::kPerTile; unit += kUnits, codes += kUnits * U::kBytes) {
      f32x16 values[kCount];
      U::with_plain(codes, true, [&](auto plain) {
        unroll<kCount>([&](auto i) {
          constexpr int kAt = i % U::kValues;
          values[i] = U::template value<kAt, plain>(codes + i / U::kValues * U::kBytes);
          const bool half = k_in_tile<kFormat>(unit + i / U::kValues, kAt) >= kHalfK;
          if constexpr (!is_float(kFormat))
            values[i] = fma(values[i], mul(scale[half], set1(unshift_of<kFormat>(kAt))), offset[half]);
        });
      });
      unroll<kCount>([&](auto i) {
        constexpr int64_t kAt = k_of_value<kFormat>(i);
        if constexpr (kAt % 2 == 0) {
          i32x16 pairs[kParts];
          cut(values[i], values[value_of_k<kFormat>(kAt + 1)], pairs);
          const int64_t k = tile + k_in_tile<kFormat>(unit, 0) + kAt;
          unroll<kParts>([&](auto part) {
            store_i32(reinterpret_cast<int32_t*>(out + (k / kPartK * kParts + part) * kPartTile + k % kPartK / 2 * 64),
                      pairs[part]);
          });
        }
      });
    }
  }
}

// Rows cut into parts.
struct PartTiles {
  uint8_t* tiles;     // [row tile][k / 32][part], 16 rows of 32 bfloat16
  float* group_sums;  // [rows][groups], for asymmetric weights
  float* unscale;     // [rows]: the factor of a result; 0 for a row with inf or nan
};

// A row below 2^-60 is multiplied by 2^60: its lower parts would be subnormal, which the unit treats as zero.
LOWBIT_INLINE float scale_up(float amax) { return amax < 0x1p-60f ? 0x1p60f : 1.0f; }

LOWBIT_INLINE void cut_row(const WeightSpec& spec, const float* x, int parts, bool swaps, const PartTiles& rows,
                           int64_t row) {
  const int64_t padded = spec.padded_k();
  const float amax = symmetric_range(x, padded, 1.0f).scale, up = scale_up(amax);
  rows.unscale[row] = amax == amax ? 1.0f / up : 0.0f;
  uint8_t* to = rows.tiles + row / kTileRows * (padded / kPartK * parts * kPartTile) + row % kTileRows * 64;
  for (int64_t k = 0; k < padded; k += kPartK, to += parts * kPartTile) {
    alignas(64) uint16_t halves[kMaxParts][kPartK];
    for (int64_t i = 0; i < kPartK; i += 16) {
      f32x16 rest = mul(load(x + k + i), set1(up));
      for (int part = 0; part < parts; part++) {
        store_bf16(halves[part] + i, upper_part(rest));
        rest = sub(rest, upper_part(rest));
      }
    }
    for (int part = 0; part < parts; part++) {
      if (swaps) swap_inner(halves[part]);
      std::memcpy(to + part * kPartTile, halves[part], sizeof halves[part]);
    }
  }
  for (int64_t g = 0; spec.asymmetric && g < spec.groups(); g++)
    rows.group_sums[row * spec.groups() + g] = up * group_sum(spec, x, g);
}

// The number of parts of activations; float8 counts before scaling.
LOWBIT_INLINE int parts_of(XFormat x_format, DType dtype) {
  if (x_format == XFormat::floating && dtype == DType::bfloat16) return parts_of(Format::bfloat16);
  if (x_format == XFormat::floating && dtype == DType::float16) return parts_of(Format::float16);
  return kMaxParts;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
