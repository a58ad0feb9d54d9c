// SPDX-License-Identifier: Apache-2.0
// int8_semi_sparse: int8 with at most two nonzero weights in each four neighbours along k (2:4). Panels hold these two
// codes and their positions, 5 bits per weight. A tile of 16 columns x 64 k is
//   positions  2 rows of 64 bytes, 16 columns x 4 codes: 2 bits each, those of codes 0..7 of a column lowest
//   codes      8 rows of 64 bytes, 16 columns x 4 codes: code - 128, signed, for 8 k of each column
// in slots 0..31 of each column, two for each four k. An empty slot has code 0 and position 0, so that it adds nothing:
// a weight has one packed form. "row-major" holds all k codes, as for int8.
#pragma once

#include "formats/int8.hpp"

namespace lowbit {

struct Int8SemiSparse : Int8 {
  static constexpr CodecKind kind = CodecKind::semi_sparse;
  static constexpr int stored_bits = 5;
  static constexpr int64_t codes_at = 128;  // offset in a tile
  static constexpr int64_t slots_of_step = 4, k_of_step = 8;

  // Reads the code of (column, k), k within the tile.
  LOWBIT_INLINE static uint32_t read(const uint8_t* tile, int64_t column, int64_t k) {
    for (int64_t slot = k / 4 * 2; slot < k / 4 * 2 + 2; slot++) {
      const CodePosition place = place_of(column, slot);
      const uint8_t code = tile[byte_of(column, slot)];
      if (code && (tile[place.byte] >> place.shift & 3) == k % 4) return code ^ 128u;
    }
    return code_of_zero;
  }
  // Writes over zeros, where at most one other code is in the four.
  LOWBIT_INLINE static void write(uint8_t* tile, int64_t column, int64_t k, uint32_t code) {
    if (code == code_of_zero) return;
    const int64_t first = k / 4 * 2, slot = first + (tile[byte_of(column, first)] != 0);
    const CodePosition place = place_of(column, slot);
    tile[byte_of(column, slot)] = static_cast<uint8_t>(code ^ 128u);
    tile[place.byte] |= static_cast<uint8_t>(k % 4 << place.shift);
  }

 private:
  LOWBIT_INLINE static constexpr int64_t byte_of(int64_t column, int64_t slot) {
    return codes_at + slot / slots_of_step * 64 + column * 4 + slot % slots_of_step;
  }
  LOWBIT_INLINE static constexpr CodePosition place_of(int64_t column, int64_t slot) {
    const int64_t step = slot / slots_of_step;
    return {step % 2 * 64 + column * 4 + slot % slots_of_step, static_cast<int>(step / 2 * 2)};
  }
};

}  // namespace lowbit
