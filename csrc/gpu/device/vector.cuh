// SPDX-License-Identifier: Apache-2.0
// The vector of one element that a CUDA thread computes with: the functions called by the templates of formats and
// rules, with the semantics and the bits of cpu/simd/scalar.hpp. Compiled without contraction (-fmad=false): an fma is
// used only where written. Conditionals select lanes: clang selects structs by address, and a struct with an address is
// in memory (Intel's newer compilers).
#pragma once

#include "core/dtype.hpp"

namespace lowbit::gpu {

struct f32 { float lane; };
struct i32 { int32_t lane; };

LOWBIT_INLINE f32 like(f32, float a) { return {a}; }
LOWBIT_INLINE i32 like(i32, int32_t a) { return {a}; }

LOWBIT_INLINE f32 add(f32 a, f32 b) { return {a.lane + b.lane}; }
LOWBIT_INLINE f32 sub(f32 a, f32 b) { return {a.lane - b.lane}; }
LOWBIT_INLINE f32 mul(f32 a, f32 b) { return {a.lane * b.lane}; }
LOWBIT_INLINE f32 div(f32 a, f32 b) { return {__fdiv_rn(a.lane, b.lane)}; }
LOWBIT_INLINE f32 sqrt(f32 a) { return {__fsqrt_rn(a.lane)}; }
LOWBIT_INLINE f32 fma(f32 a, f32 b, f32 c) { return {__fmaf_rn(a.lane, b.lane, c.lane)}; }
LOWBIT_INLINE f32 max(f32 a, f32 b) { return {a.lane > b.lane ? a.lane : b.lane}; }  // b if either is nan
LOWBIT_INLINE f32 min(f32 a, f32 b) { return {a.lane < b.lane ? a.lane : b.lane}; }
LOWBIT_INLINE f32 abs(f32 a) { return {__int_as_float(__float_as_int(a.lane) & INT32_MAX)}; }
LOWBIT_INLINE f32 to_float(i32 a) { return {__int2float_rn(a.lane)}; }
LOWBIT_INLINE i32 to_int(f32 a) { return {__float2int_rn(a.lane)}; }  // to nearest even
LOWBIT_INLINE f32 sign(f32 a) {  // -1, 1, or a if it is 0 or nan
  return {a.lane > 0 ? 1.0f : a.lane < 0 ? -1.0f : a.lane};
}

LOWBIT_INLINE i32 bits_of(f32 a) { return {__float_as_int(a.lane)}; }
LOWBIT_INLINE f32 float_of(i32 a) { return {__int_as_float(a.lane)}; }
LOWBIT_INLINE uint32_t unsigned_of(i32 a) { return static_cast<uint32_t>(a.lane); }
LOWBIT_INLINE i32 from_unsigned(uint32_t a) { return {static_cast<int32_t>(a)}; }
LOWBIT_INLINE i32 add(i32 a, i32 b) { return from_unsigned(unsigned_of(a) + unsigned_of(b)); }
LOWBIT_INLINE i32 sub(i32 a, i32 b) { return from_unsigned(unsigned_of(a) - unsigned_of(b)); }
LOWBIT_INLINE i32 mul(i32 a, i32 b) { return from_unsigned(unsigned_of(a) * unsigned_of(b)); }
LOWBIT_INLINE i32 min(i32 a, i32 b) { return {a.lane < b.lane ? a.lane : b.lane}; }
LOWBIT_INLINE i32 max(i32 a, i32 b) { return {a.lane > b.lane ? a.lane : b.lane}; }
LOWBIT_INLINE i32 max_u32(i32 a, i32 b) { return {unsigned_of(a) > unsigned_of(b) ? a.lane : b.lane}; }
LOWBIT_INLINE i32 bit_and(i32 a, i32 b) { return {a.lane & b.lane}; }
LOWBIT_INLINE i32 bit_or(i32 a, i32 b) { return {a.lane | b.lane}; }
LOWBIT_INLINE i32 bit_xor(i32 a, i32 b) { return {a.lane ^ b.lane}; }
template <int count>
LOWBIT_INLINE i32 shift_left(i32 a) { return from_unsigned(unsigned_of(a) << count); }
template <int count>
LOWBIT_INLINE i32 shift_right(i32 a) { return from_unsigned(unsigned_of(a) >> count); }  // shifts zeros in
LOWBIT_INLINE i32 shift_right(i32 a, i32 count) {  // 0 for counts of 32 or more
  return from_unsigned(__funnelshift_rc(unsigned_of(a), 0, unsigned_of(count)));
}
LOWBIT_INLINE i32 at_least(f32 a, f32 b) { return {-(a.lane >= b.lane)}; }  // mask; false for nan
LOWBIT_INLINE i32 select(i32 mask, i32 a, i32 b) { return {mask.lane ? a.lane : b.lane}; }
// The guess of dynamic::guessed_shift in two instructions instead of seven: from all bits of the difference, closer,
// and never below 0.
LOWBIT_INLINE i32 guessed_shift(i32 top, i32 bits, int guess) {
  return from_unsigned(__umulhi(unsigned_of(top) - unsigned_of(bits), static_cast<uint32_t>(guess)));
}
LOWBIT_INLINE i32 count_down_above(i32 n, f32 a, f32 b) {  // n - 1 where a > b
  return {a.lane > b.lane ? n.lane - 1 : n.lane};
}
LOWBIT_INLINE i32 negate_where_negative(i32 a, f32 b) { return {__float_as_int(b.lane) < 0 ? -a.lane : a.lane}; }

constexpr uint32_t kWarp = 0xffffffffu;
#ifdef LOWBIT_LANES  // in a sub-group of an Intel GPU
constexpr int kWarpLanes = LOWBIT_LANES;
#else
constexpr int kWarpLanes = 32;
#endif

// A table of 8 entries, distributed over 8 lanes and read by shuffles: it takes no memory. The 8 lanes share its scale,
// and all lanes of the warp read at once. Indices are modulo 8.
struct Table8 {
  float entry;

  LOWBIT_INLINE Table8() = default;
  LOWBIT_INLINE Table8(const float* entries, float factor) : entry(entries[threadIdx.x & 7] * factor) {}
};
LOWBIT_INLINE f32 lookup8(const Table8& table, i32 index) {
  return {__shfl_sync(kWarp, table.entry, index.lane, 8)};
}
LOWBIT_INLINE f32 lookup8(const float* table, i32 index) { return lookup8(Table8(table, 1.0f), index); }
LOWBIT_INLINE f32 lookup16(const float* table, i32 index) { return {table[index.lane & 15]}; }  // any lanes

}  // namespace lowbit::gpu
