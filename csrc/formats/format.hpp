// SPDX-License-Identifier: Apache-2.0
// The list of weight formats, and the packed layout they share: "x86-panel-16x64", version 1.
//
// A panel is 16 output columns over all k. n is padded to 16 and k to 64 with codes that decode to zero. Sections, each padded to 64 bytes:
//   column_scale f32[16] | column_sum f32[16] | group_scale f16[groups][16] | zero f16[groups][16] | codes
// (float formats: codes only; no group_scale per channel; no zero when symmetric). w[n,k] = column_scale * group_scale * (code - zero).
// column_sum is the sum over k of the dequantized column: what an asymmetric activation offset is multiplied by.
// Codes are tiles of 16 columns x 64 k: int8 rows of 64 bytes = 16 columns x 4 k; int4 the same, low nibble k 0..31, high nibble k 32..63;
// float32 and float16 rows of 16 columns, one k each; bfloat16 rows of 16 columns x 2 k. So one row is one zmm, two ymm, or a row of an AMX tile.
#pragma once

#include <cstdint>
#include <string_view>

#include "core/dtype.hpp"

namespace lowbit {

enum class Format : int { float32, bfloat16, float16, int8, int4 };
inline constexpr std::string_view kFormatNames[] = {"float32", "bfloat16", "float16", "int8", "int4"};

inline constexpr std::string_view kLayoutName = "x86-panel-16x64";
inline constexpr int kLayoutVersion = 1;
inline constexpr int64_t kPanelColumns = 16, kTileK = 64;

LOWBIT_INLINE constexpr bool is_float(Format format) { return format <= Format::float16; }
LOWBIT_INLINE constexpr int bits(Format format) { return format == Format::float32 ? 32 : format == Format::int8 ? 8 : format == Format::int4 ? 4 : 16; }

// Unsigned code that decodes to zero in a symmetric format.
LOWBIT_INLINE constexpr int symmetric_zero(Format format) { return format == Format::int8 ? 128 : 8; }
LOWBIT_INLINE constexpr int code_max(Format format) { return format == Format::int8 ? 255 : 15; }

struct WeightSpec {
  Format format = Format::float32;
  int64_t n = 0, k = 0;
  int64_t group_size = 0;  // along k; 0: one scale per column ("per channel")
  bool asymmetric = false;

  LOWBIT_INLINE constexpr int64_t group_k() const { return group_size ? group_size : padded_k(); }
  LOWBIT_INLINE constexpr int64_t groups() const { return group_size ? ceil_div(k, group_size) : 1; }
  LOWBIT_INLINE constexpr int64_t panels() const { return ceil_div(n, kPanelColumns); }
  LOWBIT_INLINE constexpr int64_t padded_k() const { return round_up(k, kTileK); }
  LOWBIT_INLINE constexpr int64_t tiles() const { return padded_k() / kTileK; }
  LOWBIT_INLINE constexpr int64_t tile_bytes() const { return kPanelColumns * kTileK * bits(format) / 8; }

  // Byte offsets inside a panel.
  LOWBIT_INLINE constexpr int64_t section(bool present) const { return present ? round_up(groups() * kPanelColumns * 2, 64) : 0; }
  LOWBIT_INLINE constexpr int64_t column_scale_at() const { return 0; }
  LOWBIT_INLINE constexpr int64_t column_sum_at() const { return 64; }
  LOWBIT_INLINE constexpr int64_t group_scale_at() const { return is_float(format) ? 0 : 128; }
  LOWBIT_INLINE constexpr int64_t zero_at() const { return group_scale_at() + section(!is_float(format) && group_size > 0); }
  LOWBIT_INLINE constexpr int64_t codes_at() const { return zero_at() + section(!is_float(format) && asymmetric); }
  LOWBIT_INLINE constexpr int64_t panel_bytes() const { return codes_at() + tiles() * tile_bytes(); }
};

// Position of weight (column, k) inside a panel's codes: byte offset, and for int4 whether it is the high nibble.
struct CodePosition {
  int64_t byte;
  bool high;
};
LOWBIT_INLINE constexpr CodePosition code_position(Format format, int64_t column, int64_t k) {
  const int64_t tile = k / kTileK, in = k % kTileK;
  switch (format) {
    case Format::float32: return {tile * 4096 + in * 64 + column * 4, false};
    case Format::float16: return {tile * 2048 + in * 32 + column * 2, false};
    case Format::bfloat16: return {tile * 2048 + in / 2 * 64 + column * 4 + in % 2 * 2, false};
    case Format::int8: return {tile * 1024 + in / 4 * 64 + column * 4 + in % 4, false};
    case Format::int4: break;
  }
  return {tile * 512 + in % 32 / 4 * 64 + column * 4 + in % 4, in >= 32};
}

}  // namespace lowbit
