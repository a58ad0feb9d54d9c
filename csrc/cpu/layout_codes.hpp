// SPDX-License-Identifier: Apache-2.0
// One code of a packed weight in any layout (formats/layout.hpp). Include after a header of cpu/simd/.
#pragma once

#include <cstring>

#include "formats/layout.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Code (n, k). The sections are copies, here and below: a byte that is written may not be one of them.
template <Format kFormat, class From>
LOWBIT_INLINE uint32_t read_code(Sections from, const uint8_t* in, int64_t n, int64_t k) {
  const uint8_t* codes = in + from.row(n) + from.codes;
  uint32_t code = 0;
  if constexpr (is_float(kFormat)) {
    std::memcpy(&code, codes + From::template float_at<kFormat>(n % from.columns, k), bits(kFormat) / 8);
  } else {
    From::template pieces<kFormat>(n % from.columns, k, [&](CodePosition at, int first, int count) {
      uint32_t piece = codes[at.byte] >> at.shift;
      if (at.shift + count > 8) piece |= static_cast<uint32_t>(codes[at.byte + 1]) << (8 - at.shift);
      code |= (piece & ((1u << count) - 1)) << first;
    });
  }
  return code;
}

template <Format kFormat, class To>
LOWBIT_INLINE void write_code(Sections to, uint8_t* out, int64_t n, int64_t k, uint32_t code) {  // over zeros
  uint8_t* codes = out + to.row(n) + to.codes;
  if constexpr (is_float(kFormat)) {
    std::memcpy(codes + To::template float_at<kFormat>(n % to.columns, k), &code, bits(kFormat) / 8);
  } else {
    To::template pieces<kFormat>(n % to.columns, k, [&](CodePosition at, int first, int count) {
      const uint32_t piece = (code >> first & ((1u << count) - 1)) << at.shift;
      codes[at.byte] |= static_cast<uint8_t>(piece);
      if (at.shift + count > 8) codes[at.byte + 1] |= static_cast<uint8_t>(piece >> 8);
    });
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
