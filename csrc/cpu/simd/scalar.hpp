// SPDX-License-Identifier: Apache-2.0
// The vector of 16 columns in plain C++: runs on any machine, and defines the semantics of the functions that the other
// headers implement with intrinsics.
#pragma once

#define LOWBIT_IS_SCALAR 1

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/dtype.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct f32x16 { float lane[16]; };
struct i32x16 { int32_t lane[16]; };
struct u8x64 { uint8_t lane[64]; };  // 16 columns x 4 k

#define LOWBIT_LANES for (int i = 0; i < 16; i++)

LOWBIT_INLINE f32x16 set1(float a) { f32x16 r; LOWBIT_LANES r.lane[i] = a; return r; }
LOWBIT_INLINE f32x16 load(const float* p) { f32x16 r; std::memcpy(&r, p, 64); return r; }
LOWBIT_INLINE void store(float* p, f32x16 a) { std::memcpy(p, &a, 64); }
LOWBIT_INLINE f32x16 load_f16(const uint16_t* p) {
  f32x16 r;
  LOWBIT_LANES r.lane[i] = float_from_float16(p[i]);
  return r;
}
LOWBIT_INLINE f32x16 load_bf16(const uint16_t* p) {
  f32x16 r;
  LOWBIT_LANES r.lane[i] = float_from_bfloat16(p[i]);
  return r;
}
LOWBIT_INLINE void store_f16(uint16_t* p, f32x16 a) { LOWBIT_LANES p[i] = float16_from_float(a.lane[i]); }
LOWBIT_INLINE void store_bf16(uint16_t* p, f32x16 a) { LOWBIT_LANES p[i] = bfloat16_from_float(a.lane[i]); }

LOWBIT_INLINE f32x16 add(f32x16 a, f32x16 b) { LOWBIT_LANES a.lane[i] += b.lane[i]; return a; }
LOWBIT_INLINE f32x16 sub(f32x16 a, f32x16 b) { LOWBIT_LANES a.lane[i] -= b.lane[i]; return a; }
LOWBIT_INLINE f32x16 mul(f32x16 a, f32x16 b) { LOWBIT_LANES a.lane[i] *= b.lane[i]; return a; }
LOWBIT_INLINE f32x16 div(f32x16 a, f32x16 b) { LOWBIT_LANES a.lane[i] /= b.lane[i]; return a; }
LOWBIT_INLINE f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
  LOWBIT_LANES a.lane[i] = std::fma(a.lane[i], b.lane[i], c.lane[i]);
  return a;
}
LOWBIT_INLINE f32x16 max(f32x16 a, f32x16 b) {
  LOWBIT_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}  // b if either is nan
LOWBIT_INLINE f32x16 min(f32x16 a, f32x16 b) {
  LOWBIT_LANES a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE f32x16 abs(f32x16 a) { LOWBIT_LANES a.lane[i] = std::fabs(a.lane[i]); return a; }
LOWBIT_INLINE f32x16 copysign(f32x16 a, f32x16 b) {
  LOWBIT_LANES a.lane[i] = std::copysign(a.lane[i], b.lane[i]);
  return a;
}
LOWBIT_INLINE f32x16 to_float(i32x16 a) { f32x16 r; LOWBIT_LANES r.lane[i] = static_cast<float>(a.lane[i]); return r; }
LOWBIT_INLINE i32x16 to_int(f32x16 a) {  // to nearest even; INT_MIN if out of range, like cvtps2dq
  i32x16 r;
  LOWBIT_LANES r.lane[i] =
      a.lane[i] >= -0x1p31f && a.lane[i] < 0x1p31f ? static_cast<int32_t>(std::nearbyintf(a.lane[i])) : INT32_MIN;
  return r;
}
LOWBIT_INLINE f32x16 times_power_of_two(f32x16 a, i32x16 exponent) {  // exponent in -126..127
  LOWBIT_LANES a.lane[i] *= float_from_bits(static_cast<uint32_t>(exponent.lane[i] + 127) << 23);
  return a;
}

LOWBIT_INLINE i32x16 set1(int32_t a) { i32x16 r; LOWBIT_LANES r.lane[i] = a; return r; }
LOWBIT_INLINE i32x16 add(i32x16 a, i32x16 b) {  // wraps: the fourth code of a lane may reach the sign
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) + static_cast<uint32_t>(b.lane[i]));
  return a;
}
LOWBIT_INLINE f32x16 sqrt(f32x16 a) { LOWBIT_LANES a.lane[i] = std::sqrt(a.lane[i]); return a; }

// Bit operations, for the codes of optimizer states and for random numbers. A mask is -1 or 0 in every lane.
LOWBIT_INLINE i32x16 bits_of(f32x16 a) { i32x16 r; std::memcpy(&r, &a, 64); return r; }
LOWBIT_INLINE f32x16 float_of(i32x16 a) { f32x16 r; std::memcpy(&r, &a, 64); return r; }
LOWBIT_INLINE i32x16 sub(i32x16 a, i32x16 b) {  // wraps, as add
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) - static_cast<uint32_t>(b.lane[i]));
  return a;
}
LOWBIT_INLINE i32x16 mul(i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) * static_cast<uint32_t>(b.lane[i]));
  return a;
}
LOWBIT_INLINE i32x16 min(i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE i32x16 max(i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE i32x16 bit_and(i32x16 a, i32x16 b) { LOWBIT_LANES a.lane[i] &= b.lane[i]; return a; }
LOWBIT_INLINE i32x16 bit_or(i32x16 a, i32x16 b) { LOWBIT_LANES a.lane[i] |= b.lane[i]; return a; }
LOWBIT_INLINE i32x16 bit_xor(i32x16 a, i32x16 b) { LOWBIT_LANES a.lane[i] ^= b.lane[i]; return a; }
template <int count>
LOWBIT_INLINE i32x16 shift_left(i32x16 a) {
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) << count);
  return a;
}
template <int count>
LOWBIT_INLINE i32x16 shift_right(i32x16 a) {
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) >> count);
  return a;
}  // shifts zeros in
LOWBIT_INLINE i32x16 shift_right(i32x16 a, i32x16 count) {
  LOWBIT_LANES a.lane[i] = static_cast<uint32_t>(count.lane[i]) < 32
                               ? static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) >> count.lane[i])
                               : 0;
  return a;
}
LOWBIT_INLINE i32x16 at_least(f32x16 a, f32x16 b) {
  i32x16 r;
  LOWBIT_LANES r.lane[i] = -(a.lane[i] >= b.lane[i]);
  return r;
}  // mask; false for nan
LOWBIT_INLINE bool all_at_most(f32x16 a, f32x16 b) {
  bool all = true;
  LOWBIT_LANES all &= a.lane[i] <= b.lane[i];
  return all;
}  // false if any lane is nan
LOWBIT_INLINE i32x16 select(i32x16 mask, i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = mask.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE f32x16 lookup8(const float* table, i32x16 index) {
  f32x16 r;
  LOWBIT_LANES r.lane[i] = table[index.lane[i] & 7];
  return r;
}  // 8 entries, twice, 64-byte aligned
LOWBIT_INLINE f32x16 lookup16(const float* table, i32x16 index) {  // 16 entries, by the low four bits
  f32x16 r;
  LOWBIT_LANES r.lane[i] = table[index.lane[i] & 15];
  return r;
}
// The product of the upper halves, in the upper half; the lower half of b is 0.
LOWBIT_INLINE i32x16 mul_high_u16(i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = static_cast<int32_t>(
      ((static_cast<uint32_t>(a.lane[i]) >> 16) * (static_cast<uint32_t>(b.lane[i]) >> 16)) & 0xffff0000u);
  return a;
}
LOWBIT_INLINE i32x16
sub_saturating_u16(i32x16 a, i32x16 b) {  // upper halves, not below 0; the lower half of a is 0, and stays 0
  LOWBIT_LANES {
    const uint32_t left = static_cast<uint32_t>(a.lane[i]) >> 16, right = static_cast<uint32_t>(b.lane[i]) >> 16;
    a.lane[i] = static_cast<int32_t>((left > right ? left - right : 0) << 16);
  }
  return a;
}
LOWBIT_INLINE i32x16 count_down_above(i32x16 n, f32x16 a, f32x16 b) {
  LOWBIT_LANES n.lane[i] -= a.lane[i] > b.lane[i];
  return n;
}  // n - 1 where a > b; neither negative nor nan
template <int count>
LOWBIT_INLINE i32x16 shift_right_signed(i32x16 a) {
  LOWBIT_LANES a.lane[i] >>= count;
  return a;
}
LOWBIT_INLINE bool all_bytes_have(i32x16 a, int bits) {  // one of these bits or more
  for (int byte = 0; byte < 64; byte++)
    if (!(static_cast<uint32_t>(a.lane[byte / 4]) >> byte % 4 * 8 & static_cast<uint32_t>(bits))) return false;
  return true;
}
LOWBIT_INLINE i32x16 max_u32(i32x16 a, i32x16 b) {
  LOWBIT_LANES a.lane[i] = static_cast<uint32_t>(a.lane[i]) > static_cast<uint32_t>(b.lane[i]) ? a.lane[i] : b.lane[i];
  return a;
}
LOWBIT_INLINE i32x16 negate_where_negative(i32x16 a, f32x16 b) {
  LOWBIT_LANES a.lane[i] = std::signbit(b.lane[i]) ? -a.lane[i] : a.lane[i];
  return a;
}  // or a * 0 where b is 0
LOWBIT_INLINE i32x16 load_i32(const int32_t* p) { i32x16 r; std::memcpy(&r, p, 64); return r; }
LOWBIT_INLINE i32x16 load_u8(const uint8_t* p) { i32x16 r; LOWBIT_LANES r.lane[i] = p[i]; return r; }
LOWBIT_INLINE void store_i32(int32_t* p, i32x16 a) { std::memcpy(p, &a, 64); }
LOWBIT_INLINE void store_u8(uint8_t* p, i32x16 a) {
  LOWBIT_LANES p[i] = static_cast<uint8_t>(a.lane[i] < 0 ? 0 : a.lane[i] > 255 ? 255 : a.lane[i]);
}
// 32 codes of 8 bits, or of 4, two per byte, the first in the high nibble. Loads give the floats 2^23 + code; stores
// take lanes plus an offset, saturated to 8 bits, with 4 bits only from below. Lanes and sums fit 16 bits.
LOWBIT_INLINE void load_32_u8(const uint8_t* p, f32x16& a, f32x16& b) {
  LOWBIT_LANES a.lane[i] = 0x1p23f + p[i], b.lane[i] = 0x1p23f + p[16 + i];
}
LOWBIT_INLINE void load_32_u4(const uint8_t* p, f32x16& a, f32x16& b) {
  uint8_t codes[32];
  for (int i = 0; i < 32; i++) codes[i] = i % 2 ? p[i / 2] & 15 : p[i / 2] >> 4;
  load_32_u8(codes, a, b);
}
LOWBIT_INLINE void store_32_u8(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  LOWBIT_LANES a.lane[i] += offset, b.lane[i] += offset;
  store_u8(p, a), store_u8(p + 16, b);
}
LOWBIT_INLINE void store_32_u4(uint8_t* p, i32x16 a, i32x16 b, int offset) {
  uint8_t codes[32];
  store_32_u8(codes, a, b, offset);
  LOWBIT_LANES p[i] = static_cast<uint8_t>(codes[2 * i] << 4 | codes[2 * i + 1]);
}
LOWBIT_INLINE int32_t largest(i32x16 a) {
  int32_t m = a.lane[0];
  LOWBIT_LANES m = a.lane[i] > m ? a.lane[i] : m;
  return m;
}
LOWBIT_INLINE void store_i8(int8_t* p, i32x16 a) { LOWBIT_LANES p[i] = static_cast<int8_t>(a.lane[i]); }  // values fit
LOWBIT_INLINE int32_t sum(i32x16 a) { int32_t s = 0; LOWBIT_LANES s += a.lane[i]; return s; }
LOWBIT_INLINE float sum(f32x16 a) {  // halves, then halves of these: the same order, and so the same bits, everywhere
  for (int count = 8; count; count /= 2)
    for (int i = 0; i < count; i++) a.lane[i] += a.lane[i + count];
  return a.lane[0];
}
LOWBIT_INLINE void transpose_16x16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  for (int i = 0; i < 16; i++) for (int j = 0; j < 16; j++) to[j * to_stride + i] = from[i * from_stride + j];
}
LOWBIT_INLINE float largest(f32x16 a) {  // of no nan: with one it may be any lane
  float m = a.lane[0];
  LOWBIT_LANES m = a.lane[i] > m ? a.lane[i] : m;
  return m;
}

// 16 pairs of int16, for products with the codes of keys and values.
struct i16x32 { int16_t lane[32]; };
LOWBIT_INLINE i16x32 load_i16(const int16_t* p) { i16x32 r; std::memcpy(&r, p, 64); return r; }
LOWBIT_INLINE i16x32 load_pair(const int16_t* p) {
  i16x32 r;
  for (int i = 0; i < 32; i++) r.lane[i] = p[i % 2];
  return r;
}
LOWBIT_INLINE void store_i16(int16_t* p, i32x16 a) {
  LOWBIT_LANES p[i] = static_cast<int16_t>(a.lane[i]);
}  // values must fit
LOWBIT_INLINE i16x32 zip_i8(const int8_t* a, const int8_t* b) {  // a[0] b[0] a[1] b[1] ...: 16 of each
  i16x32 r;
  LOWBIT_LANES r.lane[2 * i] = a[i], r.lane[2 * i + 1] = b[i];
  return r;
}
template <bool high>
LOWBIT_INLINE i16x32 zip_i4(const uint8_t* a, const uint8_t* b) {  // the low or high nibbles of 16 bytes of each, - 8
  i16x32 r;
  LOWBIT_LANES r.lane[2 * i] = static_cast<int16_t>((high ? a[i] >> 4 : a[i] & 15) - 8),
                          r.lane[2 * i + 1] = static_cast<int16_t>((high ? b[i] >> 4 : b[i] & 15) - 8);
  return r;
}
LOWBIT_INLINE i32x16 add_pairs(i32x16 sum, i16x32 a, i16x32 b) {
  LOWBIT_LANES sum.lane[i] += a.lane[2 * i] * b.lane[2 * i] + a.lane[2 * i + 1] * b.lane[2 * i + 1];
  return sum;
}
// Loaded once and kept in a register, where a compiler would reload it for every use.
LOWBIT_INLINE f32x16 in_register(f32x16 a) { return a; }
LOWBIT_INLINE i16x32 in_register(i16x32 a) { return a; }
// Two rows of queries share a vector, one in each half, so each element of a key is needed in both halves.
struct Twice { f32x16 a, b; };  // 16 elements: a has eight of them in each half, b the others
LOWBIT_INLINE Twice twice(const float* p) {
  Twice r;
  LOWBIT_LANES r.a.lane[i] = p[i % 8], r.b.lane[i] = p[8 + i % 8];
  return r;
}
LOWBIT_INLINE Twice twice_f16(const uint16_t* p) {
  Twice r;
  LOWBIT_LANES r.a.lane[i] = float_from_float16(p[i % 8]), r.b.lane[i] = float_from_float16(p[8 + i % 8]);
  return r;
}
LOWBIT_INLINE Twice twice_bf16(const uint16_t* p) {  // a: 0..3 and 8..11, b: 4..7 and 12..15, as unpacked
  Twice r;
  LOWBIT_LANES r.a.lane[i] = float_from_bfloat16(p[i % 4 + i % 8 / 4 * 8]),
               r.b.lane[i] = float_from_bfloat16(p[4 + i % 4 + i % 8 / 4 * 8]);
  return r;
}
// 16 bfloat16 in the cheapest order, and the inverse of that order.
LOWBIT_INLINE f32x16 load_bf16_unordered(const uint16_t* p) { return load_bf16(p); }
LOWBIT_INLINE f32x16 ordered_bf16(f32x16 a) { return a; }
LOWBIT_INLINE i16x32 twice_i8(const int8_t* p) {
  i16x32 r;
  for (int i = 0; i < 32; i++) r.lane[i] = p[i % 16];
  return r;
}
struct TwiceCodes { i16x32 low, high; };
LOWBIT_INLINE TwiceCodes twice_i4(const uint8_t* p) {  // low and high nibbles of 16 bytes, each - 8
  TwiceCodes r;
  for (int i = 0; i < 32; i++)
    r.low.lane[i] = static_cast<int16_t>((p[i % 16] & 15) - 8),
    r.high.lane[i] = static_cast<int16_t>((p[i % 16] >> 4) - 8);
  return r;
}
// Sums of the halves of a, b, c, d: [half][which], added in shuffle order: the same bits everywhere.
struct f32x8 { float lane[8]; };
LOWBIT_INLINE f32x8 load8(const float* p) { f32x8 r; for (int i = 0; i < 8; i++) r.lane[i] = p[i]; return r; }
LOWBIT_INLINE f32x8 repeat_two(const float* p) { f32x8 r; for (int i = 0; i < 8; i++) r.lane[i] = p[i % 2]; return r; }
LOWBIT_INLINE f32x8 repeat_four(const float* p) { f32x8 r; for (int i = 0; i < 8; i++) r.lane[i] = p[i % 4]; return r; }
LOWBIT_INLINE f32x8 mul(f32x8 a, f32x8 b) { for (int i = 0; i < 8; i++) a.lane[i] *= b.lane[i]; return a; }
LOWBIT_INLINE f32x8 half_sums(f32x16 a, f32x16 b, f32x16 c, f32x16 d) {
  const f32x16* all[] = {&a, &b, &c, &d};
  f32x8 r;
  for (int i = 0; i < 8; i++) {
    const float* q = all[i % 4]->lane + i / 4 * 8;
    r.lane[i] = ((q[0] + q[2]) + (q[1] + q[3])) + ((q[4] + q[6]) + (q[5] + q[7]));
  }
  return r;
}
LOWBIT_INLINE f32x8 half_sums(i32x16 a, i32x16 b, i32x16 c, i32x16 d) {
  const i32x16* all[] = {&a, &b, &c, &d};
  f32x8 r;
  for (int i = 0; i < 8; i++) {
    int32_t sum = 0;
    for (int j = 0; j < 8; j++) sum += all[i % 4]->lane[i / 4 * 8 + j];
    r.lane[i] = static_cast<float>(sum);
  }
  return r;
}
LOWBIT_INLINE void store_two_rows(float* to, int64_t stride, f32x8 a) {
  for (int i = 0; i < 8; i++) to[i / 4 * stride + i % 4] = a.lane[i];
}
LOWBIT_INLINE void store_four_rows(float* to, int64_t stride, f32x8 a) {
  for (int i = 0; i < 8; i++) to[i / 2 * stride + i % 2] = a.lane[i];
}

// One row of codes, and the value of byte or nibble number `at` (0..3, 0..7) of every column as
// float, times 2^shift(at).
LOWBIT_INLINE u8x64 load_codes(const uint8_t* p) { u8x64 r; std::memcpy(&r, p, 64); return r; }
LOWBIT_INLINE i32x16 words_of(u8x64 c) { i32x16 r; std::memcpy(&r, &c, 64); return r; }
LOWBIT_INLINE u8x64 lookup16(const uint8_t* table, u8x64 codes) {  // 16 entries, by codes below 16
  for (auto& b : codes.lane) b = table[b];
  return codes;
}
template <int at>
LOWBIT_INLINE f32x16 int8_value(u8x64 codes) {  // code - 128
  f32x16 r;
  LOWBIT_LANES r.lane[i] = static_cast<float>(codes.lane[4 * i + at] - 128);
  return r;
}
template <int at>
LOWBIT_INLINE f32x16 bf16_pair_value(u8x64 codes) {  // number `at` of a pair of bfloat16
  f32x16 r;
  LOWBIT_LANES r.lane[i] = float_from_bits((static_cast<uint32_t>(codes.lane[4 * i + 2 * at + 1]) << 24) |
                                           static_cast<uint32_t>(codes.lane[4 * i + 2 * at]) << 16);
  return r;
}
constexpr int int4_shift(int) { return 0; }
template <int at>
LOWBIT_INLINE f32x16 int4_value(u8x64 codes) {  // even: low nibble of byte at / 2; odd: high nibble
  f32x16 r;
  LOWBIT_LANES r.lane[i] =
      static_cast<float>(at % 2 ? codes.lane[4 * i + at / 2] >> 4 : codes.lane[4 * i + at / 2] & 15);
  return r;
}

// Unsigned codes of int4: 8 rows of 4 k are accumulated before total().
struct Dot4 {
  using Codes = u8x64;
  using Acc = i32x16;
  using Step = int8_t;  // element of the packed activations; 4 per step
  static constexpr int kChains = 1;  // independent accumulators, to hide the latency of step()
  static constexpr int kOffset = 0;  // int32 accumulators start at -kOffset * sum(a)
  static constexpr int kInt16 = 0;  // products that a step adds into one int16 accumulator; 0: they are int32
  LOWBIT_INLINE static Codes low(u8x64 c) { for (auto& b : c.lane) b &= 15; return c; }
  LOWBIT_INLINE static Codes high(u8x64 c) { for (auto& b : c.lane) b >>= 4; return c; }
  LOWBIT_INLINE static Acc start(i32x16 total) { return total; }
  LOWBIT_INLINE static Acc step(Acc acc, const Codes& c, const int8_t* a) {
    LOWBIT_LANES for (int k = 0; k < 4; k++) acc.lane[i] += c.lane[4 * i + k] * a[k];
    return acc;
  }
  LOWBIT_INLINE static i32x16 finish(i32x16, Acc acc) { return acc; }
};

// Codes of int8: unsigned here, so accumulators start at -128 * sum(a), as for products of code - 128.
struct Dot8 : Dot4 {
  static constexpr int kOffset = 128;
  LOWBIT_INLINE static Codes codes(u8x64 c) { return c; }
};

// Codes of 2:4 weights, signed, two in each four k: 4 of 8 k per step. A byte of `places` selects, of the step's 8
// activations, the one that a code is multiplied by. Activations are int8 + kOffset, unsigned if that is 128; offset()
// sums the excess.
struct Dot8SemiSparse {
  using Step = int8_t;
  static constexpr int kOffset = 0;
  LOWBIT_INLINE static i32x16 step(i32x16 sum, u8x64 codes, i32x16 places, const int8_t* a) {
    LOWBIT_LANES for (int slot = 0; slot < 4; slot++)
      sum.lane[i] += static_cast<int8_t>(codes.lane[4 * i + slot]) * a[places.lane[i] >> 8 * slot & 7];
    return sum;
  }
  LOWBIT_INLINE static i32x16 offset(i32x16 sum, u8x64) { return sum; }
};

constexpr int kDotRows = 2, kDotPanels = 1, kFloatRows = 2, kFloatPanels = 1, kStreamRows = 1;
constexpr bool kStreamFour = false;  // prefetch int4 with float activations as four streams: panel.hpp

#undef LOWBIT_LANES

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME

#include "cpu/simd/vector.hpp"
