// SPDX-License-Identifier: Apache-2.0
// Integer micro-kernel: rows of int8 activations times panels of int8 or int4 codes, or of 4-bit codes of levels that
// are integers times a unit, which the scales of the activations carry. Within a group of k (or a stretch
// of k without groups) the product is exact in int32; the float operations
//   t = dot * scale [ + zero | - w_zero * sum, rounded once ];  result = fma(t, w_scale, result)
// are the same on every instruction set, so all rows give the same bits.
#pragma once

#include "cpu/dot_levels.hpp"
#include "cpu/linear/activations.hpp"
#include "cpu/linear/schedule.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int64_t kStepsPerHalf = 8;
constexpr int64_t kExpandRows = 16;

template <Format kFormat>
constexpr bool kNibbles = bits(kFormat) == 4;
template <Format kFormat>
consteval auto dot_of() {
  if constexpr (kFormat == Format::int4) return Dot4{};
  else if constexpr (kNibbles<kFormat>) return DotLevels<kFormat>{};
  else return Dot8{};
}
template <Format kFormat>
using DotOf = decltype(dot_of<kFormat>());

// The steps that an accumulator holds whatever the codes are: the largest of levels are 2 * kOffset.
template <Format kFormat>
consteval int steps_in_sum() {
  if constexpr (kNibbles<kFormat>) {
    constexpr int kLargest = DotOf<kFormat>::kOffset ? 2 * DotOf<kFormat>::kOffset : code_max(kFormat);
    return kStepsPerHalf * Dot4::kInt16 * kLargest * 127 > INT16_MAX ? kStepsPerHalf / 2 : kStepsPerHalf;
  } else {
    return kStepsPerHalf;
  }
}

// Nibbles panel by panel are prefetched as the processor likes it. Several panels at once are in four streams.
template <Format kFormat, int kPanels>
using AheadOf = std::conditional_t<kNibbles<kFormat> && kPanels == 1, NibblesAhead, Ahead>;

// The address of a half's first code: two halves of nibbles share their bytes.
template <Format kFormat>
LOWBIT_INLINE const uint8_t* half_at(const uint8_t* codes, int64_t half) {
  return codes + (kNibbles<kFormat> ? half / 2 : half) * kStepsPerHalf * 64;
}

// A line of codes in one load, where load_codes has two on AVX-512: rows that have products enough to wait for gain 1.1
// times (int4, m = 2 to 6, from L3, Zen 4).
LOWBIT_INLINE u8x64 load_line(const uint8_t* step) {
  return __builtin_bit_cast(u8x64, load_i32(reinterpret_cast<const int32_t*>(step)));
}

// The codes of one step; kHigh: an odd half, which is in the high nibbles.
template <Format kFormat, bool kHigh, bool kWhole = false>
LOWBIT_INLINE auto dot_codes(const uint8_t* step) {
  if constexpr (kFormat == Format::int8) {
    return Dot8::codes(load_codes(step));
  } else {
    const u8x64 line = kWhole ? load_line(step) : load_codes(step);
    return kHigh ? DotOf<kFormat>::high(line) : DotOf<kFormat>::low(line);
  }
}

// Unpacks all codes of a panel for the dot products. Pays from kExpandRows rows on: unpacking takes an eighth (int4) to
// a fifth (int8) of the time of a tile of 4 rows; codes in planes are always unpacked.
template <Format kFormat>
LOWBIT_INLINE void expand_panel(const WeightSpec& spec, const PanelView& panel, int64_t halves,
                                typename DotOf<kFormat>::Codes* out) {
  if constexpr (kFormat == Format::int8 && std::is_same_v<typename DotOf<kFormat>::Codes, u8x64>)
    if (is_unpacked(spec.format))
      return unpack_tiles(spec.format, panel.codes, ceil_div(halves, 2), reinterpret_cast<uint8_t*>(out));
  alignas(64) uint8_t room[kByteTile];
  const uint8_t* tile = nullptr;
  for (int64_t half = 0; half < halves; half++) {
    if (half % 2 == 0) tile = readable_tiles<kFormat>(spec, panel, half / 2, 1, room);
    const uint8_t* codes = half_at<kFormat>(tile, half % 2);
    for (int64_t step = 0; step < kStepsPerHalf; step++)
      *out++ = half % 2 ? dot_codes<kFormat, true>(codes + step * 64) : dot_codes<kFormat, false>(codes + step * 64);
  }
}

// result plus one sum of a row: the float operations, in this order everywhere. w_zero: for asymmetric
// weights, else null.
template <Format kFormat>
LOWBIT_INLINE f32x16 add_sum(f32x16 result, i32x16 total, const RowSum& sum, f32x16 w_scale, const f32x16* w_zero) {
  f32x16 t = to_float(total);
  if (w_zero) t = fma(*w_zero, set1(sum.minus_sum), mul(t, set1(sum.scale)));
  else if (kFormat == Format::int4) t = fma(t, set1(sum.scale), set1(sum.zero));
  else t = mul(t, set1(sum.scale));
  return fma(t, w_scale, result);
}

// Codes from expand_panel; or as a weight has them, which may be mapped from a file and so lie at any address.
template <class Codes>
LOWBIT_INLINE Codes load_expanded(const uint8_t* p) {
  if constexpr (std::is_same_v<Codes, u8x64>) return load_line(p);
  else return *reinterpret_cast<const Codes*>(p);
}

// Adds one half (32 k; 16 k if kSteps is 4, for codes in groups of 16, which are always expanded) to total[row][panel];
// kOneHalf: it is a whole group. expanded: the panels' codes from expand_panel, or null.
template <Format kFormat, bool kHigh, bool kExpanded, bool kOneHalf, int kSteps, int kRows, int kPanels, class Step>
LOWBIT_INLINE void dot_half(const PanelView* panels, const uint8_t* expanded, int64_t expanded_stride, int64_t half,
                            const Step* const* a, AheadOf<kFormat, kPanels> (&ahead)[kPanels],
                            i32x16 (&total)[kRows][kPanels]) {
  using Dot = DotOf<kFormat>;
  constexpr int kChains = kRows * kPanels * Dot::kChains <= 8 ? Dot::kChains
                          : kRows * kPanels <= 4              ? smaller(2, Dot::kChains)
                                                              : 1;
  const uint8_t* packed[kPanels];
  constexpr auto kCodesBytes = static_cast<int64_t>(sizeof(typename Dot::Codes));
  const uint8_t* wide[kPanels];
  for (int p = 0; p < kPanels; p++) {
    packed[p] = half_at<kFormat>(panels[p].codes, half);
    wide[p] = kExpanded ? expanded + p * expanded_stride + half * kSteps * kCodesBytes : nullptr;
  }
  constexpr int kSum = smaller(kSteps, steps_in_sum<kFormat>());
#pragma GCC unroll 2
  for (int first = 0; first < kSteps; first += kSum) {
    typename Dot::Acc acc[kChains][kRows][kPanels];
#pragma GCC unroll 4
    for (int chain = 0; chain < kChains; chain++)
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; p++) acc[chain][r][p] = Dot::start(chain ? set1(int32_t{0}) : total[r][p]);
#pragma GCC unroll 8
    for (int step = first; step < first + kSum; step++) {
      if constexpr (!kExpanded && !kHigh)
        for (int p = 0; p < kPanels; p++) ahead[p].fetch(step);
      typename Dot::Codes codes[kPanels];
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; p++)
        if constexpr (kExpanded) codes[p] = load_expanded<typename Dot::Codes>(wide[p] + step * kCodesBytes);
        else codes[p] = dot_codes<kFormat, kHigh, kRows != 1 && kPanels == 1>(packed[p] + step * 64);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
        for (int p = 0; p < kPanels; p++) {
          auto& sum = acc[step % kChains][r][p];
          sum = Dot::step(sum, codes[p], a[r] + (half * kSteps + step) * 4);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; r++)
#pragma GCC unroll 4
      for (int p = 0; p < kPanels; p++) {
        const bool begins = kOneHalf && !Dot::kOffset && first == 0;
        total[r][p] = Dot::finish(begins ? set1(int32_t{0}) : total[r][p], acc[0][r][p]);
#pragma GCC unroll 4
        for (int chain = 1; chain < kChains; chain++)
          total[r][p] = add(total[r][p], Dot::finish(set1(int32_t{0}), acc[chain][r][p]));
      }
  }
  if constexpr (!kExpanded && !kHigh)
    for (int p = 0; p < kPanels; p++) ahead[p].advance(panels[p], kStepsPerHalf * 64);
}

// Adjacent panels that a tile multiplies at once, and what all tiles of rows share. A tile of 512 k is a quarter of a
// microsecond, and finding this for each took a fifth of that. A single panel, as may come last, is there twice.
template <Format kFormat>
struct Strip {
  static_assert(kDotPanels <= 2, "the last strip of a weight has one panel or all");
  const PackedWeight& weight;
  Span panels;
  const uint8_t* codes;     // as expand_panel writes them, `stride` bytes from panel to panel; or null
  int64_t stride;
  const uint8_t* upcoming;  // the panels that are read next
  int64_t halves, halves_per_sum, y_size;  // y_size: bytes of an element of y
  PanelView views[kDotPanels];
  PanelEnd ends[kDotPanels];

  Strip(const PackedWeight& weight, const Sink& sink, Span panels, const uint8_t* upcoming, const uint8_t* codes,
        int64_t stride, bool offsets)
      : weight(weight), panels(panels), codes(codes), stride(panels.count() > 1 ? stride : 0), upcoming(upcoming),
        halves(ceil_div(weight.spec.k, half_k())), halves_per_sum(Sums(weight.spec).k / half_k()),
        y_size(static_cast<int64_t>(size_of(sink.dtype))) {
    for (int p = 0; p < kDotPanels; p++) {
      const int64_t panel = panels.begin + (p < panels.count() ? p : 0);
      views[p] = view_panel(weight.spec, weight.data, panel);
      ends[p] = PanelEnd(weight, sink, panel, offsets);
    }
  }
  LOWBIT_INLINE int64_t half_k() const { return weight.spec.group_size == kHalfK / 2 ? kHalfK / 2 : kHalfK; }
};

// Rows row..row+kRows of the prepared activations times a strip, over all of k. A single panel where kPanels are wanted
// is multiplied twice: separate code for one panel and many rows was half of the code. kOneHalf: a group is one half,
// and its accumulators never leave registers (AVX2, int4, m = 512: 1.11 to 1.16x). lines: cache lines to prefetch from
// `ahead` on, this tile's share of the panels that are expanded next.
template <Format kFormat, bool kExpanded, bool kOneHalf, int kRows, int kPanels, int kSteps = kStepsPerHalf>
void dot_tile(const Strip<kFormat>& strip, const Int8Rows<typename DotOf<kFormat>::Step>& rows, const Sink& sink,
              int64_t row, const uint8_t* ahead, int64_t lines) {
  using Dot = DotOf<kFormat>;
  const WeightSpec& spec = strip.weight.spec;
  const int64_t halves = strip.halves, halves_per_sum = strip.halves_per_sum;
  const uint8_t* const codes = strip.codes;
  const int64_t stride = strip.stride;
  PanelView panels[kPanels];  // a copy, which the compiler keeps in registers: 1.03x
  for (int p = 0; p < kPanels; p++) panels[p] = strip.views[p];
  AheadOf<kFormat, kPanels> next[kPanels];
  for (int p = 0; !kExpanded && p < kPanels; p++) {
    const uint8_t* const upcoming = strip.upcoming + p * spec.panel_bytes();
    if constexpr (kNibbles<kFormat> && kPanels == 1) next[p] = NibblesAhead(spec, panels[p], upcoming);
    else next[p] = Ahead(spec, panels[p], upcoming, in_four_streams<kFormat>(spec, true));
  }
  const typename Dot::Step* a[kRows];
  const RowSum* sums[kRows];
  f32x16 result[kRows][kPanels];
  for (int r = 0; r < kRows; r++) {
    const int64_t at = rows.at(row + r);
    a[r] = rows.codes + at * rows.code_stride;
    sums[r] = rows.sums + at * rows.sum_count;
    for (int p = 0; p < kPanels; p++) {
      result[r][p] = set1(0.0f);
      if (kExpanded) sink.prefetch(row + r, strip.panels.begin + (strip.stride ? p : 0), strip.y_size);
    }
  }
  const uint8_t* const end_ahead = ahead + lines * 64;
  const int64_t lines_per_half = kExpanded ? lines / halves + 1 : 0;
  for (int64_t s = 0, half = 0; half < halves; s++) {
    const int64_t g = spec.group_size ? s : 0, end = smaller(halves, half + halves_per_sum);
    i32x16 total[kRows][kPanels];
    for (int r = 0; r < kRows; r++)
      for (int p = 0; p < kPanels; p++) total[r][p] = set1(Dot::kOffset ? sums[r][s].start : 0);
    do {
      if (kExpanded && ahead < end_ahead)
        for (int64_t line = 0; line < lines_per_half; line++, ahead += 64) __builtin_prefetch(ahead);
      if (kNibbles<kFormat> && !kExpanded && half % 2)
        dot_half<kFormat, true, kExpanded, kOneHalf, kSteps, kRows, kPanels>(panels, codes, stride, half, a, next,
                                                                             total);
      else
        dot_half<kFormat, false, kExpanded, kOneHalf, kSteps, kRows, kPanels>(panels, codes, stride, half, a, next,
                                                                              total);
    } while (++half < end && !kOneHalf);
    for (int p = 0; p < kPanels; p++) {
      const f32x16 w_scale = scale_of(panels[p], g);
      if constexpr (!kExpanded) next[p].fetch_group(panels[p], g);
      const f32x16 w_zero = sub(zero_of<kFormat>(panels[p], g), set1(value_zero<kFormat>(panels[p])));
      for (int r = 0; r < kRows; r++)
        result[r][p] =
            add_sum<kFormat>(result[r][p], total[r][p], sums[r][s], w_scale, panels[p].zero ? &w_zero : nullptr);
    }
  }
  float offsets[kRows];
  for (int r = 0; rows.offset && r < kRows; r++) offsets[r] = rows.offset[rows.at(row + r)];
  const Sink of_rows = sink.from(row);
  for (int p = 0; p < smaller(kPanels, strip.panels.count()); p++)
    finish_rows(of_rows, spec.n, strip.ends[p], kRows, strip.panels.begin + p,
                reinterpret_cast<const float*>(result[0] + p), kPanels * kPanelColumns, nullptr,
                rows.offset ? offsets : nullptr);
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
