// SPDX-License-Identifier: Apache-2.0
// Integer products of 4-bit codes of levels that are integers times a unit (formats/codec.hpp). Include after a header
// of cpu/simd/.
#pragma once

#include "formats/list.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Codes of levels, as the levels plus an offset: a look-up of bytes more than int4.
template <Format kFormat>
struct DotLevels : Dot4 {
  using Codec = codec_of<kFormat>;
  static constexpr int kOffset = Codec::byte_levels().offset;
  LOWBIT_INLINE static Codes low(u8x64 c) { return lookup16(Codec::byte_levels().of_code, Dot4::low(c)); }
  LOWBIT_INLINE static Codes high(u8x64 c) { return lookup16(Codec::byte_levels().of_code, Dot4::high(c)); }
};

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
