// SPDX-License-Identifier: Apache-2.0
// A weight [n, k] of any format (list.hpp), in the layout read by the kernels of csrc/cpu: "x86-panel-16x64". The other
// layouts are in layout.hpp.
//
// A panel is 16 output columns over all k. n is padded to 16 and k to 64 with codes that decode to zero. Sections, each
// padded to 64 bytes:
//   column_scale f32[16] | column_sum f32[16] | group_scale f16[groups][16] | zero f16[groups][16] | codes
// (float formats: codes only; no group_scale per channel; no zero when symmetric). w[n,k] = column_scale * group_scale
// * (code - zero); column_sum is the sum over k of the dequantized column: an asymmetric activation's offset is
// multiplied by it. Codes are tiles of 16 columns x 64 k; codec.hpp says where each lies in its tile. A row of a tile
// is one zmm, two ymm, or a row of an AMX tile.
#pragma once

#include <cstdint>

#include "formats/list.hpp"

namespace lowbit {

struct WeightSpec {
  Format format = Format::float32;
  int64_t n = 0, k = 0;
  int64_t group_size = 0;  // group size along k; 0: one scale per column ("per channel")
  bool asymmetric = false;

  LOWBIT_ALWAYS_INLINE constexpr int64_t group_k() const { return group_size ? group_size : padded_k(); }
  LOWBIT_ALWAYS_INLINE constexpr int64_t groups() const { return group_size ? ceil_div(k, group_size) : 1; }
  LOWBIT_ALWAYS_INLINE constexpr int64_t panels() const { return ceil_div(n, kPanelColumns); }
  LOWBIT_ALWAYS_INLINE constexpr int64_t padded_k() const { return round_up(k, kTileK); }
  LOWBIT_ALWAYS_INLINE constexpr int64_t tiles() const { return padded_k() / kTileK; }
  LOWBIT_ALWAYS_INLINE constexpr int64_t tile_bytes() const {
    return kPanelColumns * kTileK * stored_bits(format) / 8;
  }

  // Byte offsets within a panel.
  LOWBIT_ALWAYS_INLINE constexpr int64_t section(bool present) const {
    return present ? round_up(groups() * kPanelColumns * 2, 64) : 0;
  }
  LOWBIT_ALWAYS_INLINE constexpr int64_t column_scale_at() const { return 0; }
  LOWBIT_ALWAYS_INLINE constexpr int64_t column_sum_at() const { return 64; }
  LOWBIT_ALWAYS_INLINE constexpr int64_t group_scale_at() const { return is_float(format) ? 0 : 128; }
  LOWBIT_ALWAYS_INLINE constexpr int64_t zero_at() const {
    return group_scale_at() + section(!is_float(format) && group_size > 0);
  }
  LOWBIT_ALWAYS_INLINE constexpr int64_t codes_at() const {
    return zero_at() + section(!is_float(format) && asymmetric);
  }
  LOWBIT_ALWAYS_INLINE constexpr int64_t panel_bytes() const { return codes_at() + tiles() * tile_bytes(); }
};

// Offset of the tile of k within a panel's codes, and of weight (column, k) of a float format.
template <Format kFormat>
LOWBIT_INLINE constexpr int64_t tile_at(int64_t k) {
  return k / kTileK * (kPanelColumns * kTileK * codec_of<kFormat>::bits / 8);
}
template <Format kFormat>
LOWBIT_INLINE constexpr int64_t float_at(int64_t column, int64_t k) {
  return tile_at<kFormat>(k) + codec_of<kFormat>::position(column, k % kTileK);
}

}  // namespace lowbit
