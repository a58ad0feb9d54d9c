// SPDX-License-Identifier: Apache-2.0
// The row of the op repack for blocks of GGUF: codes, scales and minimums of a column are read, the numbers brought into
// their stored form, and the codes written to the tiles of its panel. Bytes and few floats, so that one instruction set
// serves all machines: 0.6 billion weights a second on a core (Q4_0, Zen 3).
#include LOWBIT_ISA_HEADER

#include <cmath>

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/rows.hpp"
#include "formats/layout.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A column of a weight.
struct Column {
  GroupNumbers read;
  uint16_t *group_scale, *zero;  // float16
  float column_scale;
};

Column column_in(Arena& arena, const WeightSpec& spec) {
  const int64_t groups = spec.groups();
  Column column{};
  column.read = {arena.array<uint8_t>(spec.padded_k()), arena.array<float>(groups), arena.array<float>(groups)};
  column.group_scale = arena.array<uint16_t>(groups), column.zero = arena.array<uint16_t>(groups);
  return column;
}

// 64 codes of a column in their planes (piece_of_code): byte i of a plane has the pieces of codes i, i + 8 count, ...
template <int bits, int count = 8>
LOWBIT_INLINE void write_codes(const uint8_t* codes, uint8_t* tile, int64_t column) {
  if constexpr (bits & count) {
    constexpr int before = bits_before_piece(bits, count), size = 8 * count;
    uint8_t bytes[size] = {};
    for (int piece = 0; piece < 8 / count; piece++)
      for (int i = 0; i < size; i++)
        bytes[i] |= static_cast<uint8_t>((codes[size * piece + i] >> before & ((1 << count) - 1)) << (count * piece));
    for (int row = 0; row < 2 * count; row++)
      std::memcpy(tile + before * 128 + row * 64 + column * 4, bytes + row * 4, 4);
  }
  if constexpr (count > 1) write_codes<bits, count / 2>(codes, tile, column);
}

// Whether the float16 fractions of this column scale are exact.
LOWBIT_INLINE bool keeps(const float* scale, int64_t groups, float column) {
  bool same = true;
  for (int64_t g = 0; g < groups; g++) {
    const float part = scale[g] / column;
    same &= float_from_float16(float16_from_float(part)) == part;
  }
  return same;
}

// The largest power of two up to the largest scale; half of it where only then all fractions are exact.
float power_below(const float* scale, int64_t groups) {
  uint32_t most = 0;
  for (int64_t g = 0; g < groups; g++) {
    const uint32_t exponent = bits_of_float(scale[g]) & 0x7f800000u;
    most = exponent > most ? exponent : most;
  }
  const float power = float_from_bits(most), half = power / 2;
  return half >= 0x1p-126f && !keeps(scale, groups, power) && keeps(scale, groups, half) ? half : power;
}

// Scales in their stored form: float16 numbers as they are, products as fractions of a power of two.
template <class Type>
LOWBIT_INLINE void store_scales(Column& column, int64_t groups) {
  const float* const scale = column.read.scale;
  column.column_scale = Type::products ? power_below(scale, groups) : 1.0f;
  for (int64_t g = 0; g < groups; g++)
    column.group_scale[g] = column.column_scale > 0 ? float16_from_float(scale[g] / column.column_scale) : uint16_t{0};
}

LOWBIT_INLINE float stored_scale(const Column& column, int64_t g) {
  return column.column_scale * float_from_float16(column.group_scale[g]);
}

// Minimums become zero points. A group whose zero point would be no float16 is stored as its minimum alone: all codes are
// 1, and the scale is the minimum; its codes contribute less than 2^-11 of it.
template <class Type>
GgufFault store_minimums(Column& column, int64_t groups) {
  float *const scale = column.read.scale, *const minimum = column.read.minimum;
  bool constants = false;
  for (int64_t g = 0; g < groups; g++) {
    column.zero[g] = std::fabs(minimum[g]) > 65504.0f * std::fabs(stored_scale(column, g));
    if (!column.zero[g]) continue;
    constants = true, scale[g] = minimum[g];
    std::memset(column.read.codes + g * Type::group, 1, Type::group);
  }
  if (constants) store_scales<Type>(column, groups);
  GgufFault fault = GgufFault::none;
  for (int64_t g = 0; g < groups; g++) {
    const bool none = column.zero[g] || minimum[g] == 0;
    column.zero[g] = none ? uint16_t{0} : float16_from_float(-minimum[g] / stored_scale(column, g));
    if ((column.zero[g] & 0x7c00u) == 0x7c00u) fault = GgufFault::range;
  }
  return fault;
}

LOWBIT_INLINE bool finite(const float* values, int64_t count) {
  bool every = true;
  for (int64_t i = 0; i < count; i++) every &= (bits_of_float(values[i]) & 0x7f800000u) != 0x7f800000u;
  return every;
}

// Reads a column, its groups in the order of the weight.
template <class Type>
LOWBIT_INLINE void read_column(const RepackArgs& args, int64_t n, GroupNumbers to) {
  constexpr int kGroups = Type::weights / Type::group;
  const TensorView& blocks = args.gguf.blocks;
  const uint8_t* block = blocks.as<const uint8_t>() + n * blocks.stride[0];
  const int32_t* const place = args.gguf.places.as<const int32_t>();
  for (int64_t first = 0; first < args.spec.groups(); first += kGroups, block += blocks.stride[1]) {
    if (!place) {
      Type::read(block, {to.codes + first * Type::group, to.scale + first, to.minimum + first});
      continue;
    }
    uint8_t codes[Type::weights];
    float scale[kGroups], minimum[kGroups] = {};
    Type::read(block, {codes, scale, minimum});
    for (int g = 0; g < kGroups; g++) {
      const int64_t at = place[first + g];
      std::memcpy(to.codes + at * Type::group, codes + g * Type::group, Type::group);
      to.scale[at] = scale[g], to.minimum[at] = minimum[g];
    }
  }
}

// The sum of the decoded column.
template <class Type>
LOWBIT_INLINE float sum_of(const Column& column, int64_t groups) {
  ColumnSum<Type::format> sum;
  for (int64_t g = 0; g < groups; g++) {
    int32_t levels = 0;
    for (int i = 0; i < Type::group; i++) levels += column.read.codes[g * Type::group + i];
    sum.levels = levels;
    const float zero = Type::minimums ? float_from_float16(column.zero[g]) : codec_of<Type::format>::zero;
    sum.end_group(Type::group, zero, float_from_float16(column.group_scale[g]));
  }
  return sum.total(column.column_scale);
}

template <class Type>
GgufFault pack_column(const RepackArgs& args, int64_t n, Column& column) {
  const WeightSpec& spec = args.spec;
  const int64_t groups = spec.groups(), at = n % kPanelColumns;
  uint8_t* const panel = args.out.as<uint8_t>() + n / kPanelColumns * spec.panel_bytes();
  uint8_t* const codes = panel + spec.codes_at();
  if (n >= spec.n) {  // padding: zeros
    std::memset(column.read.codes, Type::minimums ? 0 : codec_of<Type::format>::code_of_zero, groups * Type::group);
  } else {
    read_column<Type>(args, n, column.read);
    if (!finite(column.read.scale, groups)) return GgufFault::scale;
    store_scales<Type>(column, groups);
    if (Type::minimums) {
      if (!finite(column.read.minimum, groups)) return GgufFault::minimum;
      if (const GgufFault fault = store_minimums<Type>(column, groups); fault != GgufFault::none) return fault;
    }
    const float sum = sum_of<Type>(column, groups);
    std::memcpy(panel + spec.column_scale_at() + at * 4, &column.column_scale, 4);
    std::memcpy(panel + spec.column_sum_at() + at * 4, &sum, 4);
    for (int64_t g = 0; g < groups; g++) {
      std::memcpy(panel + spec.group_scale_at() + (g * kPanelColumns + at) * 2, column.group_scale + g, 2);
      if (Type::minimums) std::memcpy(panel + spec.zero_at() + (g * kPanelColumns + at) * 2, column.zero + g, 2);
    }
  }
  std::memset(column.read.codes + spec.k, 0, spec.padded_k() - spec.k);
  for (int64_t tile = 0; tile < spec.tiles(); tile++)
    write_codes<bits(Type::format)>(column.read.codes + tile * kTileK, codes + tile * spec.tile_bytes(), at);
  return GgufFault::none;
}

void run_gguf(const RepackArgs& args) {
  Arena counted;
  column_in(counted, args.spec);
  with_gguf_type(args.gguf.type, [&]<class Type>() {
    parallel_for(args.spec.panels(), threads_worth(2 * args.spec.n * args.spec.k), [&](int64_t panel) {
      const Scratch scratch(counted.bytes);
      Arena arena = scratch.arena();
      Column column = column_in(arena, args.spec);
      std::memset(args.out.as<uint8_t>() + panel * args.spec.panel_bytes(), 0, args.spec.codes_at());
      for (int64_t n = panel * kPanelColumns; n < (panel + 1) * kPanelColumns; n++)
        if (const GgufFault fault = pack_column<Type>(args, n, column); fault != GgufFault::none)
          __atomic_store_n(args.gguf.fault, static_cast<int>(fault), __ATOMIC_RELAXED);
    });
  });
}

std::string_view refuses_others(const RepackArgs& args) { return args.gguf ? "" : "packs blocks of GGUF"; }

constexpr Kernel<RepackArgs> kRows[] = {{LOWBIT_ROW("repack_gguf"), refuses_others, run_gguf}};

}  // namespace

void quantize_gguf_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
