// SPDX-License-Identifier: Apache-2.0
// The scale of a group by search: of many, the one with the least sum of importance * (w - dequantized)^2 over the
// group, and never one that is worse than that of the group's range (absmax). Include after a header of cpu/simd/.
//
// A lane is a group: the same k of 16 columns. Weights come as y = w / absmax scale, so that no sum overflows. With the
// scale u (in absmax scales) their levels are l = nearest(y / u), and the best scale for those levels is
//   t = sum h y l / sum h l^2, which leaves sum h y^2 - (sum h y l)^2 / sum h l^2   (h: importance)
// so the candidate u with the largest (sum h y l)^2 / sum h l^2 wins. Its t is rounded to what is stored and weighed
// against absmax as it is; its levels give the next t, once.
#pragma once

#include <cstddef>

#include "cpu/loops.hpp"
#include "formats/list.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Candidates: how many steps the larger side of a group's range has, as a part of those that the codes have. Whole
// steps of int4 are among them (4 to 8, which are 1 to 3 too), so that multiples of one scale come back exactly: the
// first of two that are as good stays, and comes before one that takes a third or a fifth of that scale.
constexpr float kSymmetricSteps[] = {0.5f, 0.625f, 0.6875f, 0.75f, 0.8125f, 0.875f,
                                     0.9375f, 1.0f, 1.0625f, 1.125f, 1.25f, 1.375f, 1.5f, 1.75f};
constexpr float kAsymmetricSteps[] = {12 / 15.0f, 8 / 15.0f, 9 / 15.0f, 10 / 15.0f, 11 / 15.0f, 13 / 15.0f,
                                      14 / 15.0f, 1.0f, 16 / 15.0f, 17 / 15.0f, 18 / 15.0f, 20 / 15.0f,
                                      22 / 15.0f, 25 / 15.0f};
constexpr std::size_t kFirstWithin = 6;  // of both, with 4 bits or more: the first that no weight leaves the levels by
constexpr float kLookupSteps[] = {0.8f, 0.85f, 0.9f, 0.95f, 1.0f, 1.05f, 1.1f, 1.2f};  // a level costs 15 comparisons
constexpr float kMargin = 1 + 0x1p-16f;  // what float32 sums of a group may be off by
constexpr int kRefits = 1;

LOWBIT_INLINE f32x16 select(i32x16 mask, f32x16 a, f32x16 b) { return float_of(select(mask, bits_of(a), bits_of(b))); }
LOWBIT_INLINE i32x16 less(f32x16 a, f32x16 b) { return bit_and(at_least(b, a), bit_xor(at_least(a, b), set1(-1))); }

// Levels of an integer format around its zero point: low <= code - zero <= high.
struct LevelRange { f32x16 low, high; };

// The integer nearest to y * inverse, which is below 2^22: a sum with 1.5 * 2^23 has no fraction.
LOWBIT_INLINE f32x16 nearest_integer(f32x16 y, f32x16 inverse) {
  return sub(fma(y, inverse, set1(0x1.8p23f)), set1(0x1.8p23f));
}

// The level nearest to y * inverse; kWithin: one of the range.
template <class Codec, bool kWithin = false>
LOWBIT_INLINE f32x16 nearest_level(f32x16 y, f32x16 inverse, LevelRange range) {
  if constexpr (Codec::kind == CodecKind::lookup) return Codec::level_of(Codec::nearest(mul(y, inverse)));
  else if constexpr (kWithin) return nearest_integer(y, inverse);
  else return max(range.low, min(range.high, nearest_integer(y, inverse)));
}

struct Group {
  const float* y;           // [count][16]
  const float* importance;  // [count], or null where every weight counts the same
  int64_t count;
  float code_max;
};

struct Sums {
  f32x16 error = set1(0.0f), product = set1(0.0f), square = set1(0.0f);  // of h (y - l u)^2, h y l, h l^2
};

// What the scale u costs, and what the levels that it gives are made of.
template <class Codec, bool kWeighted>
LOWBIT_INLINE Sums weigh(const Group& group, f32x16 u, LevelRange range) {
  const f32x16 inverse = div(set1(1.0f), u);
  Sums sums;
  for (int64_t i = 0; i < group.count; i++) {
    const f32x16 y = load(group.y + i * 16), level = nearest_level<Codec>(y, inverse, range);
    const f32x16 error = sub(y, mul(level, u)), h = set1(kWeighted ? group.importance[i] : 1.0f);
    const f32x16 weighted = kWeighted ? mul(h, level) : level;
    sums.error = fma(kWeighted ? mul(h, error) : error, error, sums.error);
    sums.product = fma(weighted, y, sums.product), sums.square = fma(weighted, level, sums.square);
  }
  return sums;
}

// The best candidate yet: its sums, and the range of its levels.
struct Best {
  f32x16 product = set1(0.0f), square = set1(1.0f);
  LevelRange range;
};

// Candidates with these inverse scales, kCount at a time: one load of a weight serves all.
template <class Codec, bool kWeighted, bool kWithin, int kCount>
[[gnu::noinline]] void consider(const Group& group, const f32x16 (&inverse)[kCount], const LevelRange (&range)[kCount],
                            Best& best) {
  f32x16 product[kCount], square[kCount];
  for (int j = 0; j < kCount; j++) product[j] = square[j] = set1(0.0f);
  for (int64_t i = 0; i < group.count; i++) {
    const f32x16 y = load(group.y + i * 16), h = set1(kWeighted ? group.importance[i] : 1.0f);
    unroll<kCount>([&](auto j) {
      const f32x16 level = nearest_level<Codec, kWithin>(y, inverse[j], range[j]),
                   weighted = kWeighted ? mul(h, level) : level;
      product[j] = fma(weighted, y, product[j]), square[j] = fma(weighted, level, square[j]);
    });
  }
  for (int j = 0; j < kCount; j++) {
    const i32x16 better = less(mul(mul(best.product, mul(best.product, set1(kMargin))), square[j]),
                               mul(mul(product[j], product[j]), best.square));
    best.product = select(better, product[j], best.product), best.square = select(better, square[j], best.square);
    best.range = {select(better, range[j].low, best.range.low), select(better, range[j].high, best.range.high)};
  }
}

LOWBIT_INLINE LevelRange around(f32x16 zero, float code_max) {
  return {sub(set1(0.0f), zero), sub(set1(code_max), zero)};
}

// All candidates of a group whose weights reach `down` below zero and `high` above it, in absmax scales.
template <class Codec, bool kWeighted, std::size_t kSteps>
LOWBIT_INLINE void consider_all(const Group& group, const float (&steps)[kSteps], float levels, bool asymmetric,
                                f32x16 down, f32x16 high, Best& best) {
  static_assert(kSteps % 2 == 0);
  const f32x16 tiny = set1(0x1p-100f), width = max(tiny, asymmetric ? add(down, high) : max(down, high)),
               zero = set1(0.0f), most = set1(group.code_max);
  const LevelRange own = best.range;
  for (std::size_t at = 0; at < kSteps; at += 2) {
    f32x16 inverse[2];
    LevelRange range[2] = {own, own};
    for (int j = 0; j < 2; j++) {
      const float count = steps[at + j] * levels;
      const int beyond = count > levels ? static_cast<int>((count - levels) / 2 + 0x1p-8f) : 0;  // clips evenly
      inverse[j] = div(set1(count), width);
      if (!asymmetric) continue;
      const f32x16 at_zero = sub(nearest_integer(down, inverse[j]), set1(static_cast<float>(beyond)));
      range[j] = around(max(zero, min(most, at_zero)), group.code_max);
    }
    if (group.code_max >= 15 && at < kFirstWithin) consider<Codec, kWeighted, true>(group, inverse, range, best);
    else consider<Codec, kWeighted, false>(group, inverse, range, best);
  }
}

// What is chosen for a group: the scale as `stored` is, the zero point, and the error of absmax in its own scales.
struct Choice { f32x16 scale, zero, absmax_error; };

// A scale as it is stored: float16, over the power of two of its column. Per channel, float32, of which 16 bits are
// kept: a scale that is as short is then met exactly.
LOWBIT_INLINE f32x16 as_stored(f32x16 scale, bool half_scales) {
  if (!half_scales) return float_of(bit_and(add(bits_of(scale), set1(0x80)), set1(~0xff)));
  alignas(64) uint16_t half[16];
  store_f16(half, scale);
  return load_f16(half);
}

// `stored`: the absmax scale, as it is stored; `zero`: the zero point that goes with it; scales stay below `limit`.
template <class Codec, bool kWeighted>
LOWBIT_INLINE Choice search(const Group& group, bool asymmetric, bool half_scales, f32x16 stored, f32x16 zero,
                            f32x16 limit) {
  constexpr bool kIntegers = Codec::kind == CodecKind::integer;
  const f32x16 none = set1(0.0f);
  f32x16 low = none, high = none;
  for (int64_t i = 0; i < group.count; i++)
    low = min(low, load(group.y + i * 16)), high = max(high, load(group.y + i * 16));
  const f32x16 down = sub(none, low);

  // Below zero there is one level more than above: the larger side gets it, by a negative scale if need be.
  const i32x16 flip = kIntegers && !asymmetric ? less(down, high) : set1(0);
  const LevelRange straight = around(zero, group.code_max);
  Best best{.range = {select(flip, sub(none, straight.high), straight.low),
                      select(flip, sub(none, straight.low), straight.high)}};
  auto all = [&](const auto& steps, float levels) {
    consider_all<Codec, kWeighted>(group, steps, levels, asymmetric, down, high, best);
  };
  if constexpr (!kIntegers) all(kLookupSteps, Codec::range);
  else if (asymmetric) all(kAsymmetricSteps, group.code_max);
  else all(kSymmetricSteps, (group.code_max + 1) / 2);

  Sums sums = weigh<Codec, kWeighted>(group, set1(1.0f), straight);
  Choice choice{.scale = stored, .zero = zero, .absmax_error = sums.error};
  f32x16 least = sums.error, product = best.product, square = best.square;
  for (int i = 0; i <= kRefits; i++) {
    const f32x16 scale = as_stored(mul(div(product, square), stored), half_scales);
    sums = weigh<Codec, kWeighted>(group, div(scale, stored), best.range);
    const i32x16 better = bit_and(less(sums.error, least), less(scale, limit));
    least = select(better, sums.error, least);
    choice.scale = select(better, select(flip, sub(none, scale), scale), choice.scale);
    choice.zero = select(better, asymmetric ? sub(none, best.range.low) : zero, choice.zero);
    product = sums.product, square = sums.square;
  }
  return choice;
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
