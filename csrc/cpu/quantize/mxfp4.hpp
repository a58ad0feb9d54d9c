// SPDX-License-Identifier: Apache-2.0
// Blocks of MXFP4 (ops/quantize.hpp) in the layout of the kernels, panel by panel. Include after a header of cpu/simd/.
#pragma once

#include "core/parallel.hpp"
#include "cpu/dot_levels.hpp"
#include "cpu/quantize/nibbles.hpp"
#include "formats/layout.hpp"
#include "ops/quantize.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kBlockK = 32, kBlockBytes = 16;

// 2^exponent as float16, 0 below its range.
LOWBIT_INLINE uint16_t half_power(int exponent) {
  if (exponent < -24) return 0;
  return static_cast<uint16_t>(exponent < -14 ? 1 << (exponent + 24) : (exponent + 15) << 10);
}

// The exponent of a row's column scale, e8m0: that of its largest block, or one with which smaller blocks are exact
// too. The scales of blocks are float16 powers of two, 2^-24 to 2^15, times it.
LOWBIT_INLINE int column_exponent(int least, int most) {
  const int wanted = least + 24 < most ? larger(least + 24, most - 15) : most;
  return larger(wanted, 24);
}

// Writes column scales and the scales of blocks; returns whether all are numbers.
LOWBIT_INLINE bool pack_powers(const RepackArgs& args, int64_t first, int64_t columns, uint8_t* panel) {
  const WeightSpec& spec = args.spec;
  const TensorView& scales = args.blocks.scales;
  uint16_t* const of_block = reinterpret_cast<uint16_t*>(panel + spec.group_scale_at());
  bool numbers = true;
  for (int64_t column = 0; column < columns; column++) {
    const uint8_t* const row = scales.as<const uint8_t>() + (first + column) * scales.stride[0];
    int least = 255, most = 0;
    for (int64_t g = 0; g < spec.groups(); g++) {
      const int power = row[g * scales.stride[1]];
      least = smaller(least, power), most = larger(most, power);
    }
    numbers &= most < 255;
    const int exponent = column_exponent(least, most);
    const float scale = __builtin_bit_cast(float, exponent << 23);
    std::memcpy(panel + spec.column_scale_at() + column * 4, &scale, 4);
    for (int64_t g = 0; g < spec.groups(); g++)
      of_block[g * kPanelColumns + column] = half_power(row[g * scales.stride[1]] - exponent);
  }
  return numbers;
}

template <bool kHalves>
LOWBIT_INLINE void pack_codes(const RepackArgs& args, int64_t first, int64_t columns, uint8_t* tiles) {
  const TensorView& codes = args.blocks.codes;
  const int64_t groups = args.spec.groups();
  alignas(16) static constexpr uint8_t none[kBlockBytes] = {};
  for (int64_t g = 0; g < groups; g += 2, tiles += args.spec.tile_bytes())
    for (int64_t column = 0; column < columns; column++) {
      const uint8_t* const block =
          codes.as<const uint8_t>() + (first + column) * codes.stride[0] + g * codes.stride[1];
      write_nibbles<kHalves>(block, g + 1 < groups ? block + codes.stride[1] : none, tiles, column);
    }
}

// The sums of the decoded columns: a product by ones for each block, added as ColumnSum (formats/layout.hpp) adds them,
// 16 columns at a time. A sum of levels times a power of two is exact, so that nothing of it is left over.
LOWBIT_INLINE void pack_sums(const WeightSpec& spec, uint8_t* panel) {
  using Dot = DotLevels<Format::fp4_e2m1>;
  using Sum = ColumnSum<Format::fp4_e2m1>;
  const Dot::Step ones[4] = {1, 1, 1, 1};
  const f32x16 unit = set1(Dot::Codec::integer_unit * Sum::kUnits);
  const i32x16 start = set1(static_cast<int32_t>(-Dot::kOffset * kBlockK));
  const uint16_t* const of_block = reinterpret_cast<const uint16_t*>(panel + spec.group_scale_at());
  f32x16 high = set1(0.0f), low = set1(0.0f);
  for (int64_t g = 0; g < spec.groups(); g++) {
    const uint8_t* const tile = panel + spec.codes_at() + g / 2 * spec.tile_bytes();
    auto acc = Dot::start(start);
    for (int64_t row = 0; row < 8; row++) {
      const u8x64 line = load_codes(tile + row * 64);
      acc = Dot::step(acc, g % 2 ? Dot::high(line) : Dot::low(line), ones);
    }
    const f32x16 product =
        mul(mul(to_float(Dot::finish(start, acc)), unit), load_f16(of_block + g * kPanelColumns));
    const f32x16 total = add(high, product), part = sub(total, high);
    low = add(low, add(sub(high, sub(total, part)), sub(product, part)));
    high = total;
  }
  alignas(64) float highs[kPanelColumns], lows[kPanelColumns];
  store(highs, high), store(lows, low);
  for (int64_t column = 0; column < kPanelColumns; column++) {
    float scale;
    std::memcpy(&scale, panel + spec.column_scale_at() + column * 4, 4);
    const float total = Sum{.high = highs[column], .low = lows[column]}.total(scale);
    std::memcpy(panel + spec.column_sum_at() + column * 4, &total, 4);
  }
}

// Returns whether all scales of the panel are numbers.
bool pack_panel(const RepackArgs& args, int64_t index) {
  const WeightSpec& spec = args.spec;
  const int64_t first = index * kPanelColumns, columns = smaller(kPanelColumns, spec.n - first);
  uint8_t* const panel = args.out.as<uint8_t>() + index * spec.panel_bytes();
  std::memset(panel, 0, columns < kPanelColumns ? spec.panel_bytes() : spec.codes_at());
  const bool numbers = pack_powers(args, first, columns, panel);
  if (args.blocks.halves) pack_codes<true>(args, first, columns, panel + spec.codes_at());
  else pack_codes<false>(args, first, columns, panel + spec.codes_at());
  pack_sums(spec, panel);
  return numbers;
}

void pack_blocks(const RepackArgs& args) {
  parallel_for(args.spec.panels(), threads_worth(2 * args.spec.n * args.spec.k), [&](int64_t index) {
    if (!pack_panel(args, index)) __atomic_store_n(args.blocks.nan, true, __ATOMIC_RELAXED);
  });
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
