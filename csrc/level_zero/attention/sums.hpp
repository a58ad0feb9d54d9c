// SPDX-License-Identifier: Apache-2.0
// Gradients of the tensors captured by score_mod and of a mask, by atomics and yet with the same bits every time:
// as in CUDA's captured.cuh, but with integers alone, as many of these GPUs have no double. In units of 2^-bits of
// the power of 2 above the largest value, `high` has the integer part and `low` as many bits after the point; the
// host combines them.
#pragma once

#include "level_zero/attention/scores.hpp"

namespace lowbit::level_zero {

__device__ uint32_t atomic_add(volatile Global<uint32_t>* to, uint32_t value) __asm__("_Z10atomic_addPU3AS1Vjj");
__device__ uint32_t atomic_max(volatile Global<uint32_t>* to, uint32_t value) __asm__("_Z10atomic_maxPU3AS1Vjj");
__device__ uint32_t atomic_or(volatile Global<uint32_t>* to, uint32_t value) __asm__("_Z9atomic_orPU3AS1Vjj");

// In halves, with a carry: 64-bit atomics are an extension of OpenCL.
LOWBIT_INLINE void atomic_add(Global<uint64_t>* to, uint64_t value) {
  auto* const halves = (Global<uint32_t>*)(to);  // NOLINT: no other cast can
  const auto low = static_cast<uint32_t>(value), high = static_cast<uint32_t>(value >> 32);
  const uint32_t before = atomic_add(halves, low), carried = before + low < low;
  if (high + carried) atomic_add(halves + 1, high + carried);
}

struct TwoParts {
  uint64_t high, low;
};

// magnitude: bits of a finite float without its sign; largest: those of the largest one.
LOWBIT_INLINE TwoParts parts_of(uint32_t magnitude, uint32_t largest, int bits) {
  const auto exponent = static_cast<int>(magnitude >> 23), above = static_cast<int>(largest >> 23) - 126;
  const uint64_t digits = (magnitude & 0x7fffffu) | (exponent ? 0x800000u : 0);
  const int shift = (exponent ? exponent : 1) - 150 + bits - above;
  if (shift >= 0) return {digits << shift, 0};
  const int behind = -shift;  // digits in `low`
  const uint64_t high = behind < 24 ? digits >> behind : 0, rest = digits - (high << (behind < 24 ? behind : 0));
  const int low_shift = bits - behind;
  if (low_shift >= 0) return {high, rest << low_shift};
  return {high, low_shift < -24 ? 0 : ((rest >> (-low_shift - 1)) + 1) >> 1};
}

using GlobalSums = Global<Sums>;
LOWBIT_INLINE GlobalSums* sums_of(Global<int32_t>* fault) {
  return (GlobalSums*)(fault + kSumsAt / 4);  // NOLINT: no other cast can
}

LOWBIT_INLINE void add_to(GlobalSums* sums, int tensor, int64_t at, float value) {
  if (value == 0) return;
  const uint32_t bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
  const bool finite = magnitude < 0x7f800000u, negative = bits >> 31;
  if (!sums->adds) {
    if (finite && magnitude > sums->largest[tensor]) atomic_max(&sums->largest[tensor], magnitude);
    return;
  }
  const int64_t copy = blockIdx.x % sums->of[tensor].copies;
  Global<SumWords>* const to = global<SumWords>(sums->of[tensor].words) + copy * sums->of[tensor].count + at;
  if (!finite) {
    atomic_or((Global<uint32_t>*)(&to->special),  // NOLINT
              magnitude > 0x7f800000u ? kSumNan : negative ? kSumMinusInfinite : kSumInfinite);
    return;
  }
  const TwoParts parts = parts_of(magnitude, sums->largest[tensor], sums->bits);
  if (parts.high) atomic_add(&to->high, negative ? 0 - parts.high : parts.high);
  if (parts.low) atomic_add(&to->low, negative ? 0 - parts.low : parts.low);
}

LOWBIT_INLINE void sums_start(const SumsCall& call) {
  const int64_t at = blockIdx.x * int64_t{kAttentionThreads} + threadIdx.x;
  constexpr int kWords = sizeof(Sums) / 8;
  static_assert(sizeof(Sums) % 8 == 0);
  if (at == 0) {
#pragma unroll
    for (int i = 0; i < kWords; i++)
      global<uint64_t>(call.to)[i] = reinterpret_cast<const uint64_t*>(&call.sums)[i];
  }
#pragma unroll
  for (int tensor = 0; tensor < Sums::kMax; tensor++) {
    const Sums::Of& of = call.sums.of[tensor];
    if (at >= of.count * of.copies) continue;
    Global<SumWords>* const words = global<SumWords>(of.words) + at;
    words->high = 0, words->low = 0, words->special = 0;
  }
}
// To be called once the largest values are known.
LOWBIT_INLINE void sums_add(const SumsCall& call) {
  if (threadIdx.x == 0) sums_of(global<int32_t>(call.to) - kSumsAt / 4)->adds = 1;
}

}  // namespace lowbit::level_zero
