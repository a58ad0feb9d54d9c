// SPDX-License-Identifier: Apache-2.0
// The integer products of all rows: blocks of rows, strips of panels, tiles (dot_tile.hpp).
#pragma once

#include "cpu/linear/dot_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// The family of micro-kernels for int8 codes. Blocks of rows stay in L2 while the panels stream past:
//
//                  a Strip of panels               the next one ->
//   all rows         expand_panel, if they are many  ...
//   rows of tile 0   dot_tile, all of k
//   rows of tile 1   dot_tile
//   ...
template <Format kFormat>
struct CodeRows {
  using Dot = DotOf<kFormat>;
  using Step = typename Dot::Step;
  using Codes = typename Dot::Codes;
  static constexpr int64_t kPass = 512, kPiece = 8;
  static constexpr bool kSixteens = kFormat == Format::int8 || kStepK<kFormat> == kHalfK / 2;  // groups of 16
  static constexpr bool kAsStored = kFormat == Format::int8 && std::is_same_v<Codes, u8x64>;  // codes are read in place
  static constexpr PanelCut kCut{.at_once = kDotPanels};

  XView x;
  int64_t count;
  Int8Rows<Step> rows;

  CodeRows(const XView& x, const WeightSpec& spec, int64_t count, Arena& arena)
      : x(x), count(count), rows(take_rows<Step>(spec, x.format, count, 1, arena)) {}

  // Row r of this object is the prepared row index[r] of `all`.
  CodeRows(const CodeRows& all, const int32_t* index, int64_t count) : x(all.x), count(count), rows(all.rows) {
    rows.index = index;
  }

  int64_t pieces() const { return ceil_div(count, kPiece); }
  void prepare(const WeightSpec& spec, int64_t piece) const {
    quantize_rows<Dot>(x, spec, rows, piece_of(count, kPiece, piece));
  }

  RowBlocks blocks(const WeightSpec& spec) const {
    const int64_t row_bytes = spec.padded_k() * static_cast<int64_t>(sizeof(Step));
    return {count, larger(kDotRows, kL2Block / row_bytes / kDotRows * kDotRows)};
  }

  void multiply(const PackedWeight& weight, const Sink& sink, Span block, Span panels) const {
    const WeightSpec& spec = weight.spec;
    const int64_t steps = panel_steps(spec);
    // Codes that are multiplied as they are stored need no copy (W8A8, M=512, VNNI: 1.07x).
    const bool expand = block.count() >= kExpandRows || is_unpacked(spec.format) || spec.group_size == kHalfK / 2,
               stored = kAsStored && !is_unpacked(spec.format);
    const Scratch memory(expand && !stored ? kDotPanels * steps * static_cast<int64_t>(sizeof(Codes)) : 0);
    Codes* const expanded = memory.as<Codes>();
    const int64_t at_once = expand || !alone(block.count()) ? kDotPanels : 1,
                  stride = stored ? spec.panel_bytes() : steps * static_cast<int64_t>(sizeof(Codes));
    for (int64_t panel = panels.begin; panel < panels.end; panel += at_once) {
      const Span now{panel, smaller(panels.end, panel + at_once)};
      for (int p = 0; expand && !stored && p < now.count(); p++)
        expand_panel<kFormat>(spec, view_panel(spec, weight.data, panel + p), steps / kStepsPerHalf,
                              expanded + p * steps);
      const uint8_t* const codes = stored ? view_panel(spec, weight.data, panel).codes : memory.as<uint8_t>();
      multiply_rows({weight, sink, now, weight.upcoming(panels, panel + at_once), expand ? codes : nullptr, stride,
                     rows.offset != nullptr},
                    sink, block);
    }
  }

 private:
  // Whether panels that are not expanded are read one at a time: one row wants one sequential stream (VNNI, one thread,
  // 28 -> 39 GB/s), and so does what is prefetched in one (W4A8, m = 2 to 6: 1.1 to 1.3 times, Zen 4).
  static bool alone(int64_t rows) { return rows == 1 || (kNibbles<kFormat> && reads_through_l2()); }
  static int64_t panel_steps(const WeightSpec& spec) {
    return spec.padded_k() / kHalfK * kStepsPerHalf;  // codes in planes fill whole tiles
  }

  // All rows of a block times a strip.
  void multiply_rows(const Strip<kFormat>& strip, const Sink& sink, Span block) const {
    const WeightSpec& spec = strip.weight.spec;
    const RowTiles tiles(block.count(), kDotRows);
    const int64_t lines = ceil_div(kDotPanels * spec.panel_bytes() / 64, tiles.count);
    const uint8_t* ahead = strip.upcoming;
    int64_t row = block.begin;
    for (int64_t tile = 0; tile < tiles.count; tile++, ahead += lines * 64)
      with_count<kDotRows>(static_cast<int>(block.begin + tiles.begin(tile + 1) - row), [&](auto kRows) {
        const auto run = [&](auto kExpanded, auto kPanels, auto kOneHalf, auto kSteps) {
          dot_tile<kFormat, kExpanded, kOneHalf, kRows, kPanels, kSteps>(strip, rows, sink, row, ahead, lines);
        };
        constexpr std::true_type yes;
        constexpr std::false_type no;
        constexpr std::integral_constant<int, 1> one;
        constexpr std::integral_constant<int, kDotPanels> several;
        constexpr std::integral_constant<int, kStepsPerHalf> whole;
        const bool one_half = spec.group_size == kHalfK;
        const auto stream = [&](auto kPanels) {
          if constexpr (kNibbles<kFormat> && kPanels == 1)
            if (one_half) return run(no, kPanels, yes, whole);
          run(no, kPanels, no, whole);
        };
        const auto multiply = [&] {
          if constexpr (kSixteens)
            if (spec.group_size == kHalfK / 2)
              return run(yes, several, yes, std::integral_constant<int, kStepsPerHalf / 2>{});
          one_half ? run(yes, several, yes, whole) : run(yes, several, no, whole);
        };
        if (!strip.codes) {
          if constexpr (kNibbles<kFormat> || kRows == 1) alone(block.count()) ? stream(one) : stream(several);
          else stream(several);
        } else if constexpr (2 * kRows >= kDotRows || kSixteens) {
          multiply();  // no tile of kExpandRows or more rows is lower; codes in planes, read as int8, are all expanded
        }
        row += kRows;
      });
  }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
