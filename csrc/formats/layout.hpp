// SPDX-License-Identifier: Apache-2.0
// The list of layouts: where codes, scales and zero points of a weight [n, k] lie in one uint8 matrix, whose first
// dimension is along n. A state dict names the layout of each weight by its number here: append, never reorder.
//
//   columns                        of the weight's [n] in one row of the matrix
//   rows, row_bytes                shape of the matrix
//   stored_n, stored_k             n and k with padding, whose codes decode to zero
//   column_scale, column_sum, group_scale, zero, code<format>
//                                  where each one is, in bytes from the start: float32, float32 (the sum over k of the
//                                  decoded column), float16, float16, and the code of (column, k). What a format has
//                                  not (format.hpp says which) is not asked for.
#pragma once

#include <type_traits>

#include "formats/format.hpp"

namespace lowbit {

// "x86-panel-16x64": what the kernels of csrc/cpu read.
struct PanelLayout {
  static constexpr int64_t columns = kPanelColumns;
  static constexpr bool has_column_sum = true;
  WeightSpec spec;  // a copy: a byte that is written may not be one of it

  LOWBIT_INLINE int64_t rows() const { return spec.panels(); }
  LOWBIT_INLINE int64_t row_bytes() const { return spec.panel_bytes(); }
  LOWBIT_INLINE int64_t stored_n() const { return spec.panels() * columns; }
  LOWBIT_INLINE int64_t stored_k() const { return spec.padded_k(); }
  LOWBIT_INLINE int64_t column_scale(int64_t n) const { return in_panel(n, spec.column_scale_at(), 4); }
  LOWBIT_INLINE int64_t column_sum(int64_t n) const { return in_panel(n, spec.column_sum_at(), 4); }
  LOWBIT_INLINE int64_t group_scale(int64_t n, int64_t g) const {
    return in_panel(n, spec.group_scale_at() + g * columns * 2, 2);
  }
  LOWBIT_INLINE int64_t zero(int64_t n, int64_t g) const { return in_panel(n, spec.zero_at() + g * columns * 2, 2); }
  template <Format kFormat>
  LOWBIT_INLINE CodePosition code(int64_t n, int64_t k) const {
    const CodePosition at = code_position<kFormat>(n % columns, k);
    return {n / columns * row_bytes() + spec.codes_at() + at.byte, at.high};
  }

 private:
  LOWBIT_INLINE int64_t in_panel(int64_t n, int64_t section, int64_t size) const {
    return n / columns * row_bytes() + section + n % columns * size;
  }
};

// "row-major": a row of the matrix is a row of the weight by itself, for exchange and for devices that want it so:
//   column_scale f32 | group_scale f16 [groups] | zero f16 [groups] | codes [k]
// each padded to 16 bytes; of two codes in a byte the first is the low nibble. No sums, no padding of n and k.
struct RowMajorLayout {
  static constexpr int64_t columns = 1, kAlign = 16;
  static constexpr bool has_column_sum = false;
  WeightSpec spec;

  LOWBIT_INLINE int64_t rows() const { return spec.n; }
  LOWBIT_INLINE int64_t row_bytes() const {
    return codes_at() + round_up(ceil_div(spec.k * bits(spec.format), 8), kAlign);
  }
  LOWBIT_INLINE int64_t stored_n() const { return spec.n; }
  LOWBIT_INLINE int64_t stored_k() const { return spec.k; }
  LOWBIT_INLINE int64_t column_scale(int64_t n) const { return n * row_bytes(); }
  LOWBIT_INLINE int64_t group_scale(int64_t n, int64_t g) const { return n * row_bytes() + kAlign + g * 2; }
  LOWBIT_INLINE int64_t zero(int64_t n, int64_t g) const { return n * row_bytes() + zero_at() + g * 2; }
  template <Format kFormat>
  LOWBIT_INLINE CodePosition code(int64_t n, int64_t k) const {
    constexpr int kBits = codec_of<kFormat>::bits;
    return {n * row_bytes() + codes_at() + k * kBits / 8, kBits == 4 && k % 2 == 1};
  }

 private:
  LOWBIT_INLINE int64_t per_group(bool present) const { return present ? round_up(spec.groups() * 2, kAlign) : 0; }
  LOWBIT_INLINE int64_t zero_at() const {
    return is_float(spec.format) ? 0 : kAlign + per_group(spec.group_size > 0);
  }
  LOWBIT_INLINE int64_t codes_at() const { return zero_at() + per_group(spec.asymmetric); }
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

inline constexpr Layout kKernelLayout = Layout::x86_panel_16x64;  // what quantize writes, and the other ops read

// Of the numbers beside a packed weight in a state dict. 1: seven of them, "x86-panel-16x64"; 2: the layout is the
// eighth.
inline constexpr int kLayoutVersion = 2;

// body(layout) for the layout that is only known now.
template <class Body>
LOWBIT_INLINE auto with_layout(Layout layout, const WeightSpec& spec, Body&& body) {
  switch (layout) {
#define LOWBIT_LAYOUT(id, Type, name) \
  case Layout::id: return body(Type{spec});
    LOWBIT_LAYOUTS(LOWBIT_LAYOUT)
#undef LOWBIT_LAYOUT
  }
  __builtin_unreachable();
}

// The sum over k of one decoded column, code by code: the same steps, and so the same bits, wherever it is computed.
template <Format kFormat>
struct ColumnSum {
  using Levels = std::conditional_t<kind_of(kFormat) == CodecKind::integer, int64_t, double>;
  double total = 0;
  Levels levels = 0;

  LOWBIT_INLINE void add(int code) { levels += codec_of<kFormat>::level(code); }
  LOWBIT_INLINE void end_group(int64_t count, float zero, float scale) {
    total += (static_cast<double>(levels) - static_cast<double>(zero) * static_cast<double>(count)) * scale;
    levels = 0;
  }
};

}  // namespace lowbit
