// SPDX-License-Identifier: Apache-2.0
// The list of layouts. A layout arranges codes, scales and zero points of a weight [n, k] in one uint8 matrix,
// whose first dimension is along n. A state dict stores the number of each weight's layout in this list:
// append, never reorder.
//
// A layout defines the sections (`sections`), and the position of (column, k) in the codes of a row of the matrix: the
// byte of a float (`float_at<format>`), or each piece of a code (`pieces` calls body(position, first, count) for its
// bits first .. first + count). leaves_out_zeros: 2:4 weights have the form of int8_semi_sparse.hpp.
#pragma once

#include <type_traits>

#include "formats/format.hpp"

namespace lowbit {

// All in bytes; sections from the start of a row. Callers do not request a section that a format lacks (format.hpp).
struct Sections {
  int64_t columns;             // columns of the weight's [n] per row of the matrix
  int64_t rows, row_bytes;     // shape of the matrix
  int64_t stored_n, stored_k;  // n and k with padding, whose codes decode to zero
  int64_t column_scale;        // float32
  int64_t column_sum;          // float32, the sum over k of the decoded column; or none
  int64_t group_scale, zero;   // float16 [groups]
  int64_t codes;
  static constexpr int64_t none = -1;

  LOWBIT_INLINE int64_t row(int64_t n) const { return n / columns * row_bytes; }
  // Entry (g, n) of a section with entries of this size, from the start of the matrix.
  LOWBIT_INLINE int64_t at(int64_t section, int64_t size, int64_t n, int64_t g = 0) const {
    return row(n) + section + (g * columns + n % columns) * size;
  }
};

// "x86-panel-16x64", the layout read by the kernels of csrc/cpu.
struct PanelLayout {
  static constexpr bool leaves_out_zeros = true;
  static Sections sections(const WeightSpec& spec) {
    return {.columns = kPanelColumns, .rows = spec.panels(), .row_bytes = spec.panel_bytes(),
            .stored_n = spec.panels() * kPanelColumns, .stored_k = spec.padded_k(),
            .column_scale = spec.column_scale_at(), .column_sum = spec.column_sum_at(),
            .group_scale = spec.group_scale_at(), .zero = spec.zero_at(), .codes = spec.codes_at()};
  }
  template <Format kFormat>
  LOWBIT_INLINE static int64_t float_at(int64_t column, int64_t k) { return lowbit::float_at<kFormat>(column, k); }
  template <class Body>
  LOWBIT_INLINE static void pieces(int bits, int64_t column, int64_t k, Body&& body) {
    const int64_t tile = k / kTileK * (kPanelColumns * kTileK * bits / 8);
    for (int count = 1; count <= bits; count *= 2) {
      if (!(bits & count)) continue;
      const CodePosition at = piece_of_code(bits, count, column, k % kTileK);
      body(CodePosition{tile + at.byte, at.shift}, bits_before_piece(bits, count), count);
    }
  }
};

// "row-major": a row of the matrix is a self-contained row of the weight, for exchange and for devices that prefer it:
//   column_scale f32 | group_scale f16 [groups] | zero f16 [groups] | codes [k]
// each padded to 16 bytes; codes are packed bit by bit, from the lowest bit of a byte on: of two codes in a byte the
// first is the low nibble. No sums, no padding of n and k.
struct RowMajorLayout {
  static constexpr bool leaves_out_zeros = false;
  static Sections sections(const WeightSpec& spec) {
    const bool coded = !is_float(spec.format);
    const int64_t per_group = round_up(spec.groups() * 2, 16), group_scale = coded ? 16 : 0,
                  zero = group_scale + (coded && spec.group_size ? per_group : 0),
                  codes = zero + (spec.asymmetric ? per_group : 0),
                  code_bytes = round_up(ceil_div(spec.k * bits(spec.format), 8), 16);
    return {.columns = 1, .rows = spec.n, .row_bytes = codes + code_bytes, .stored_n = spec.n, .stored_k = spec.k,
            .column_scale = 0, .column_sum = Sections::none, .group_scale = group_scale, .zero = zero, .codes = codes};
  }
  template <Format kFormat>
  LOWBIT_INLINE static int64_t float_at(int64_t, int64_t k) { return k * codec_of<kFormat>::bits / 8; }
  template <class Body>
  LOWBIT_INLINE static void pieces(int bits, int64_t, int64_t k, Body&& body) {
    body(CodePosition{k * bits / 8, static_cast<int>(k * bits % 8)}, 0, bits);
  }
};

#define LOWBIT_LAYOUTS(X)                            \
  X(x86_panel_16x64, PanelLayout, "x86-panel-16x64") \
  X(row_major, RowMajorLayout, "row-major")

#define LOWBIT_LAYOUT(id, Type, name) id,
enum class Layout : int { LOWBIT_LAYOUTS(LOWBIT_LAYOUT) };
#undef LOWBIT_LAYOUT
#define LOWBIT_LAYOUT(id, Type, name) name,
inline constexpr std::string_view kLayoutNames[] = {LOWBIT_LAYOUTS(LOWBIT_LAYOUT)};
#undef LOWBIT_LAYOUT

inline constexpr Layout kKernelLayout = Layout::x86_panel_16x64;  // written by quantize, read by the other ops

// The version of the integers stored with a packed weight in a state dict. 1: seven of them, "x86-panel-16x64"; 2: the
// eighth is the layout.
inline constexpr int kLayoutVersion = 2;

// Calls body.operator()<Type>() for a layout known at run time only.
template <class Body>
LOWBIT_ALWAYS_INLINE auto with_layout(Layout layout, Body&& body) {
  switch (layout) {
#define LOWBIT_LAYOUT(id, Type, name) \
  case Layout::id: return body.template operator()<Type>();
    LOWBIT_LAYOUTS(LOWBIT_LAYOUT)
#undef LOWBIT_LAYOUT
  }
  __builtin_unreachable();
}

// The sum over k of one decoded column, code by code: the same operations, and so the same bits, wherever it is
// computed. Many GPUs have no double: levels and zero points are counted in units that make both integers, and the sum
// of the groups is a pair of floats (Knuth's two-sum), exact to 2^-46.
template <Format kFormat>
struct ColumnSum {
  static constexpr bool kIntegers = is_integer(kFormat);
  static constexpr float kUnits = kIntegers ? 0x1p24f : 0x1p31f;  // units per 1: for a float16; for the levels of fp4
  int64_t levels = 0;
  float high = 0, low = 0;

  LOWBIT_INLINE void add(int code) {
    if constexpr (kIntegers) levels += codec_of<kFormat>::level(code);
    else levels += static_cast<int64_t>(codec_of<kFormat>::level(code) * kUnits);
  }
  // Adds a group of `count` codes; scale: relative to that of the column.
  LOWBIT_INLINE void end_group(int64_t count, float zero, float scale) {
    const int64_t sum = kIntegers ? (levels << 24) - static_cast<int64_t>(zero * kUnits) * count : levels;
    const float of_sum = static_cast<float>(sum), rest = static_cast<float>(sum - static_cast<int64_t>(of_sum)),
                product = of_sum * scale, total = high + product, part = total - high;
    low += ((high - (total - part)) + (product - part)) +
           __builtin_fmaf(rest, scale, __builtin_fmaf(of_sum, scale, -product));
    high = total, levels = 0;
  }
  LOWBIT_INLINE float total(float column_scale) const {
    return __builtin_fmaf(high / kUnits, column_scale, low / kUnits * column_scale);
  }
};

}  // namespace lowbit
