// SPDX-License-Identifier: Apache-2.0
// 4-bit floats with a sign bit.
//   fp4        bitsandbytes': two bits of exponent and one of mantissa, in an order of its own, divided by 12
//   fp4_e2m1   OCP Microscaling 1.0: two bits of exponent (bias 1), one of mantissa; used by MXFP4 and NVFP4
// Code 8 is a second code of 0 (-0 in e2m1), which is read and never written.
#pragma once

#include "formats/codec.hpp"

namespace lowbit {

namespace {
constexpr Levels kFp4Levels({0.0f, 0.0625f / 12, 8.0f / 12, 1.0f, 4.0f / 12, 6.0f / 12, 2.0f / 12, 3.0f / 12,  //
                             0.0f, -0.0625f / 12, -8.0f / 12, -1.0f, -4.0f / 12, -6.0f / 12, -2.0f / 12,
                             -3.0f / 12});
constexpr Levels kFp4E2M1Levels({0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,  //
                                 -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f});
constexpr ByteLevels kFp4E2M1Bytes(kFp4E2M1Levels, 0.5f);
}  // namespace

struct Fp4 : LookupCodec<Fp4, 0> {
  static constexpr float range = 1;
  LOWBIT_INLINE static constexpr const Levels& levels() { return kFp4Levels; }
};

struct Fp4E2M1 : LookupCodec<Fp4E2M1, 0> {
  static constexpr int significant_bits = 2, smallest_group = 16;  // group size of NVFP4
  static constexpr float range = 6, integer_unit = 0.5f;
  LOWBIT_INLINE static constexpr const Levels& levels() { return kFp4E2M1Levels; }
  LOWBIT_INLINE static constexpr const ByteLevels& byte_levels() { return kFp4E2M1Bytes; }
};

}  // namespace lowbit
