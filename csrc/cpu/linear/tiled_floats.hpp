// SPDX-License-Identifier: Apache-2.0
// Float activations on the tile unit. It multiplies bfloat16, so a float is cut into parts of 8 bits that add up to it,
// x = x0 + x1 + x2: float32 exactly in 3, float16 in 2, integer codes in 1. The products of parts x_i * w_j with i + j
// < 3 are computed: the rest is below 2^-24 of a product, the rounding of a float32 FMA. Scales are applied to the
// sums, as in dot.hpp.
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

// With fewer, vector products are as fast; they read a panel once per 8 rows (figures: docs/measured/linear.md).
LOWBIT_INLINE int64_t min_rows(const WeightSpec& spec, XFormat x_format, DType dtype) {
  const bool looked_up = looks_up_parts(spec), one_part = parts_of(spec.format) == 1;
  const bool bfloat16 = parts_of(x_format, dtype) == 1;
  if (looked_up && one_part) return bfloat16 ? 6 : 9;
  return bfloat16 && (looked_up || one_part) ? 9 : kMinRows;
}

// One loop for every format and number of parts: dispatch is negligible beside the products, 64 cycles per pair.
struct PartProduct {
  using Sum = float;
  static constexpr int64_t step = kPartK, tile_bytes = 64;
  const PackedWeight& weight;
  const XView& x;
  const PartTiles& rows;
  bool scaled;
  int x_parts, parts, code_max;
  // Two panels take up to two thirds of L1. If accumulators leave the registers at the end of a block, that pays.
  int64_t weight_bytes, sum_k, k, block_k;

  PartProduct(const PackedWeight& weight, const XView& x, const PartTiles& rows, bool scaled)
      : weight(weight), x(x), rows(rows), scaled(scaled), x_parts(parts_of(x.format, x.dtype)),
        parts(scaled ? 2 : parts_of(weight.spec.format)),
        code_max(lowbit::code_max(read_as(weight.spec.format))),
        weight_bytes(kPanelColumns * 2 * parts), sum_k(scaled ? weight.spec.padded_k() : weight.spec.group_k()),
        k(smaller(weight.spec.padded_k(), weight.spec.group_k() * weight.spec.groups())),
        block_k(TileUnit::kSumsInRegisters
                    ? 512
                    : equal_blocks(k, sum_k, TileUnit::kL1 / 3 / weight_bytes / kTileK * kTileK)) {}

  LOWBIT_INLINE int64_t row_bytes() const { return k / kPartK * x_parts * 64; }
  LOWBIT_INLINE bool long_sums() const { return sum_k >= block_k; }

  LOWBIT_INLINE const uint8_t* weights(int64_t panel, int64_t k, int64_t length, uint8_t* room) const {
    const WeightSpec& spec = weight.spec;
    const PanelView view = view_panel(spec, weight.data, panel);
    if (spec.format == Format::bfloat16 && TileUnit::kRowsTogether == 1)
      return view.codes + k / kTileK * spec.tile_bytes();
    with_format(spec.format, [&]<Format kFormat>() {
      if constexpr (!TileUnit::kSumsInRegisters && significant_bits(kFormat) + 11 <= 16)
        if (scaled) return cut_panel<read_as(kFormat), true>(spec, view, k, length, room);
      cut_panel<read_as(kFormat), false>(spec, view, k, length, room);
    });
    join_columns(room, round_up(length, kTileK) * weight_bytes);
    return room;
  }

  LOWBIT_INLINE bool sums_are_products() const { return sum_k <= kPartK && x_parts * parts == 1; }

  template <int kFirst, int kRowTiles, int kPanels, class Meanwhile>
  LOWBIT_INLINE void multiply(int64_t row_tile, int64_t begin, int64_t end, const uint8_t* const* weights,
                              int64_t block, Meanwhile&& meanwhile) const {
    const int64_t row_bytes = weight.spec.padded_k() / kPartK * x_parts * kPartTile, x_step = x_parts * kPartTile,
                  w_step = parts * kPartTile, from = (begin - block) / kPartK * w_step;
    const uint8_t* a = rows.tiles + row_tile * row_bytes + begin / kPartK * x_step;
    const auto x_at = [&](int r, int64_t at, int i) __attribute__((always_inline)) {
      return TileRows{a + r * row_bytes + at * x_step + i * kPartTile, 64, x_step};
    };
    const auto w_at = [&](int p, int64_t at, int j) __attribute__((always_inline)) {
      return TileRows{weights[p] + from + at * w_step + j * kPartTile, 64, w_step};
    };
    const int64_t steps = ceil_div(end - begin, kPartK);
    with_x_tiles(long_sums(), [&](auto x_tiles) __attribute__((always_inline)) {
      const auto add_parts = [&](int64_t steps, int64_t at, int i, int j, auto&& then) __attribute__((always_inline)) {
        multiply_steps<Sum, kFirst, kRowTiles, kPanels>(
            steps, [&](int r) { return x_tiles(x_at(r, at, i)); }, [&](int p) { return w_at(p, at, j); }, then);
      };
      if (x_parts * parts == 1) return add_parts(steps, 0, 0, 0, meanwhile);
      if (x_parts == 1 && parts == 2) {  // activations stay loaded for the second part of the weights
        for (int64_t step = 0; step < steps; step++) {
          const auto add = [&]<int kPart, Loads kLoads>() __attribute__((always_inline)) {
            multiply_tiles<Sum, kFirst, kRowTiles, kPanels, kLoads>([&](int r) { return x_tiles(x_at(r, step, 0)); },
                                                                    [&](int p) { return w_at(p, step, kPart).rows; });
          };
          add.template operator()<0, Loads::both>();
          add.template operator()<1, Loads::weights>();
          meanwhile();
        }
        return;
      }
      for (int64_t step = 0; step < steps; step++) {
        for (int j = 0; j < parts; j++)
          for (int i = 0; i < smaller(x_parts, kMaxParts - j); i++) add_parts(1, step, i, j, [] {});
        meanwhile();
      }
    });
  }

  LOWBIT_INLINE SumScale scale_of_sum(int64_t panel, int64_t g) const {
    if (scaled) return {set1(1.0f), set1(0.0f)};
    const PanelView view = view_panel(weight.spec, weight.data, panel);
    const f32x16 zero = zero_of<Format::int8>(view, g);  // for any format that has zero points
    return {scale_of(view, g), sub(whole_zero(view, zero, code_max), zero)};
  }

  // Sums of group g of 16 rows.
  struct OfRows {
    const float *group_sums, *unscale;
    int64_t groups;
    bool asymmetric;
    template <bool kAsymmetric>
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      f32x16 total = load(sums);
      if (kAsymmetric) total = fma(of.zero, set1(group_sums[i * groups]), total);
      return fma(total, of.scale, result);
    }
    LOWBIT_INLINE f32x16 add(const Sum* sums, int64_t i, const SumScale& of, f32x16 result) const {
      return asymmetric ? add<true>(sums, i, of, result) : add<false>(sums, i, of, result);
    }
    LOWBIT_INLINE f32x16 end(f32x16 value, const PanelEnd& end, int64_t row) const {
      value = mul(value, set1(unscale[row]));
      return end.scales ? mul(value, end.scale) : value;
    }
  };
  LOWBIT_INLINE OfRows of_rows(int64_t row_tile, int64_t g) const {
    const int64_t groups = weight.spec.groups();
    return {rows.group_sums + row_tile * kTileRows * groups + g, rows.unscale, groups, weight.spec.asymmetric};
  }
  // A row with inf or nan is stored too, but store_rest overwrites it.
  LOWBIT_INLINE bool only_scales(const Sink& sink) const { return only_stores(sink); }
  LOWBIT_INLINE void scale(const Sum* sums, int64_t row_tile, int64_t g, const SumScale& of, ResultRows& result) const {
    const OfRows of_rows = this->of_rows(row_tile, g);
    const auto scale_rows = [&](auto asymmetric) __attribute__((always_inline)) {
      unroll<kTileRows>([&](auto i) __attribute__((always_inline)) {
        result.row[i] = of_rows.template add<asymmetric>(sums + i * kPanelColumns, i, of, result.row[i]);
      });
    };
    if (weight.spec.asymmetric) scale_rows(std::true_type{});
    else scale_rows(std::false_type{});
  }

  LOWBIT_INLINE PanelEnd panel_end(const Sink& sink, int64_t panel) const {
    return PanelEnd(weight, sink, panel, false);
  }
  LOWBIT_INLINE void store_rows(const Sink& sink, int64_t row, int64_t count, int64_t panel,
                                const float* results) const {
    finish_rows(weight, sink.from(row), count, panel, results, kPanelColumns, rows.unscale + row, nullptr);
  }
  LOWBIT_INLINE void store_row(const Sink& sink, const PanelEnd& end, int64_t row, int64_t panel, f32x16 value) const {
    if (rows.unscale[row] != 0.0f)
      finish_row(sink, weight.spec.n, end, row, panel, mul(value, set1(rows.unscale[row])), nullptr);
  }

  // A row with inf or nan is computed as one of few rows: inf times a lower part of 0 would be nan.
  void store_rest(const Sink& sink, int64_t count, Span panels) const {
    for (int64_t row = 0; row < count; row++)
      if (rows.unscale[row] == 0.0f) [[unlikely]] multiply_alone(sink.from(row), row, panels);
  }

  void multiply_alone(const Sink& sink, int64_t row, Span panels) const {
    with_format(weight.spec.format, [&]<Format kFormat>() {
      constexpr Format kRead = read_as(kFormat);
      const WeightSpec& spec = weight.spec;
      Arena counted;
      OrderedRows(spec, 1, counted), counted.array<uint8_t>(unpacked_bytes<kRead>(spec));
      const Scratch memory(counted.bytes);
      Arena arena = memory.arena();
      const OrderedRows ordered(spec, 1, arena);
      uint8_t* const room = arena.array<uint8_t>(unpacked_bytes<kRead>(spec));
      order_rows<kRead>(x, spec, row, 1, ordered);
      for (int64_t panel = panels.begin; panel < panels.end; panel++)
        stream_panel<kRead, kStepK<kRead>, 1>(weight, readable_panel<kRead>(weight, panel, room), ordered, sink, 0,
                                              panel);
    });
  }
};

// The family of micro-kernels for floats on the tile unit.
struct PartedRows {
  static constexpr int64_t kPass = kTilePass;
  static constexpr PanelCut kCut = kTiledCut;

  XView x;
  int64_t count;
  bool scaled;
  PartTiles rows;

  PartedRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), scaled(scales_weights(spec, x.format, x.dtype, count)), rows(take(spec, arena)) {}

  int64_t pieces() const { return ceil_div(count, kTileRows); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    const int64_t padded = spec.padded_k();
    const int parts = parts_of(x.format, x.dtype);
    const Scratch buffer(padded * static_cast<int64_t>(sizeof(float)));
    const Span range = piece_of(count, kTileRows, piece);
    for (int64_t row = range.begin; row < range.end; row++)
      cut_row(spec, widen_row(x, row, padded, buffer.as<float>()), parts, looks_up_parts(spec) && !scaled, rows, row);
    const int64_t tiles = padded / kPartK * parts;  // of 16 rows
    for (int64_t tile = range.begin / kTileRows * tiles, end = tile + tiles; tile < end; tile++)
      join_rows(rows.tiles + tile * kPartTile, 64, range.count(), 64);
  }

  RowBlocks blocks(const WeightSpec&) const { return {count, kPass}; }

  void multiply(const PackedWeight& weight, const Sink& sink, Span, Span panels) const {
    multiply_by_tiles(PartProduct(weight, x, rows, scaled), sink, count, panels);
  }

 private:
  PartTiles take(const WeightSpec& spec, Arena& arena) const {
    const int64_t padded = round_up(count, kTileRows), bytes = parts_of(x.format, x.dtype) * kPartTile;
    return {.tiles = arena.array<uint8_t>(padded / kTileRows * (spec.padded_k() / kPartK) * bytes),
            .group_sums = arena.array<float>(spec.asymmetric ? padded * spec.groups() : 0),
            .unscale = arena.array<float>(count)};
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
