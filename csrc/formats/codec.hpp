// SPDX-License-Identifier: Apache-2.0
// What a codec is: the meaning of the codes of one weight format, in one header each (int4.hpp ...), named in list.hpp.
//
//   bits               of one code
//   is_float           the code is the weight itself: no scales, no zero point, nothing to choose
//   zero, code_max     integer formats: the code of 0 in a symmetric weight, and the largest code
//   position           where the code of (column, k) lies in a tile of 16 columns x 64 k
//   encode, decode     float formats: a weight to its code and back, exactly as a kernel rounds
// and for kernels, over any vector of 16 columns: a unit is unit_bytes of codes that hold unit_values weights of each
// column;
//   k_of(unit, at)     where value `at` of unit `unit` stands in the 64 k of its tile
//   value<at, Lanes>   that value as float: code - value_zero, times 2^shift<at>() where a device reads it so. Lanes
//   loads 16 columns.
#pragma once

#include <string_view>

#include "core/dtype.hpp"

namespace lowbit {

inline constexpr int64_t kPanelColumns = 16, kTileK = 64;

// Position of a weight inside a panel's codes: byte offset, and for codes of half a byte whether it is the high nibble.
struct CodePosition {
  int64_t byte;
  bool high;
};

template <int kBits>
struct FloatCodec {
  static constexpr int bits = kBits, zero = 0, code_max = 0;
  static constexpr bool is_float = true;
  static constexpr float value_zero = 0;
};

template <int kBits>
struct IntegerCodec {
  static constexpr int bits = kBits, zero = 1 << (kBits - 1), code_max = (1 << kBits) - 1;
  static constexpr bool is_float = false;
};

}  // namespace lowbit
