// SPDX-License-Identifier: Apache-2.0
// bfloat16 parameters with a correction of 8 bits (the idea of FlashOptim, arXiv 2602.23349). Together they are the
// leading 24 bits of a float32: value = float_of(bits_of(p) + 256 c), so c counts 256ths of the distance from p to the
// bfloat16 value after it (c > 0) or before it in magnitude, and p is the bfloat16 value nearest to the whole.
// The 8 bits that do not fit are rounded by a threshold that differs between 16 neighbours, and walks over all values
// from step to step (Weyl's sequence). So equal updates below the last bit move a parameter as far as they should, and
// an update of 0 leaves it; with a threshold in the middle, 2^-17 of the parameter would be lost in every step.
// Where p is zero, c only counts away from it: a parameter that the user set to zero has an old correction, and minus
// one in its bits would be nan.
#pragma once

#include "cpu/vector_io.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// `bytes` are the bits of `count` corrections, or of 16 if there are more.
LOWBIT_INLINE f32x16 with_correction(f32x16 p, const uint8_t* bytes, int64_t count) {
  uint8_t some[16] = {};
  if (count < 16) [[unlikely]] {
    for (int64_t i = 0; i < count; i++) some[i] = bytes[i];
    bytes = some;
  }
  const i32x16 bits = bits_of(p), whole = add(bits, shift_right_signed<16>(shift_left<24>(load_u8(bytes))));
  return float_of(select(shift_right_signed<31>(bit_xor(bits, whole)), bits, whole));  // those whose sign would change
}

// The thresholds, from 0 to 255, of each 16 elements in a step of a tensor.
LOWBIT_INLINE i32x16 thresholds(double step) {
  constexpr uint32_t kOfElement = 0xc13fa9a9, kOfStep = 0x9e3779b9;  // 0.755, and the golden ratio, times 2^32
  alignas(64) int32_t lanes[16];
  for (uint32_t i = 0; i < 16; i++)
    lanes[i] = static_cast<int32_t>((i * kOfElement + static_cast<uint32_t>(step) * kOfStep) >> 24);
  return load_i32(lanes);
}

// Writes bfloat16 parameters and their corrections. nan stays nan, and its correction means nothing.
LOWBIT_INLINE void store_corrected(uint16_t* to, uint8_t* bytes, int64_t count, f32x16 value,
                                   const i32x16& thresholds) {
  const i32x16 bits = select(at_least(value, value), bits_of(value), set1(0x7fc00000));
  const i32x16 whole = add(bits, thresholds);
  const i32x16 nearest = shift_right_signed<16>(add(whole, set1(0x8000)));
  const i32x16 low = bit_and(shift_right<8>(whole), set1(0xff));
  if (count >= 16) [[likely]] {
    store_i16(reinterpret_cast<int16_t*>(to), nearest), store_u8(bytes, low);
    return;
  }
  int16_t some_nearest[16];
  uint8_t some_low[16];
  store_i16(some_nearest, nearest), store_u8(some_low, low);
  for (int64_t i = 0; i < count; i++) to[i] = static_cast<uint16_t>(some_nearest[i]), bytes[i] = some_low[i];
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
