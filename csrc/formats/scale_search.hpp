// SPDX-License-Identifier: Apache-2.0
// Searches the scale of a group: of many candidates, the one with the least sum of importance * (w - dequantized)^2
// over the group, and never worse than that of the group's range (absmax). The same text for CPUs and devices.
//
// A lane of a vector is a group: the same k of 16 columns on CPUs, one group per thread on GPUs. Weights are given as
// y = w / absmax scale, so that no sum overflows. With the scale u (in absmax scales) their levels are
// l = nearest(y / u), and the best scale for those levels is
//   t = sum h y l / sum h l^2, which leaves sum h y^2 - (sum h y l)^2 / sum h l^2   (h: importance)
// so the candidate u with the largest (sum h y l)^2 / sum h l^2 wins. Its t is rounded for storage and compared with
// absmax in that form; its levels give the next t, once.
//
// A Group has count and code_max, y(i) as a vector (Float), importance(i), and rounds scales to float16 and back
// (to_float16). kSparesClamps: if no weight can exceed the levels, separate code skips clamping.
#pragma once

#include <cstddef>
#include <iterator>

#include "formats/list.hpp"

namespace lowbit {
namespace {

// Candidates: the number of steps in the larger side of a group's range, as a fraction of the code's steps. Whole steps
// of int4 are among them (4 to 8, which cover 1 to 3 too), so that multiples of one scale are reproduced exactly: in a
// tie the first stays, and precedes one with a third or a fifth of its scale.
constexpr float kSymmetricSteps[] = {0.5f, 0.625f, 0.6875f, 0.75f, 0.8125f, 0.875f,
                                     0.9375f, 1.0f, 1.0625f, 1.125f, 1.25f, 1.375f, 1.5f, 1.75f};
constexpr float kAsymmetricSteps[] = {12 / 15.0f, 8 / 15.0f, 9 / 15.0f, 10 / 15.0f, 11 / 15.0f, 13 / 15.0f,
                                      14 / 15.0f, 1.0f, 16 / 15.0f, 17 / 15.0f, 18 / 15.0f, 20 / 15.0f,
                                      22 / 15.0f, 25 / 15.0f};
constexpr int kFirstWithin = 6;  // in both lists, with 4 bits or more: the first scale at which no weight is clipped
constexpr float kLookupSteps[] = {0.8f, 0.85f, 0.9f, 0.95f, 1.0f, 1.05f, 1.1f, 1.2f};  // a level costs 15 comparisons
static_assert(std::size(kSymmetricSteps) == 14 && std::size(kAsymmetricSteps) == 14 && std::size(kLookupSteps) == 8);
constexpr float kMargin = 1 + 0x1p-16f;  // error margin of float32 sums over a group
constexpr int kRefits = 1;

template <class Float>
using BitsOf = decltype(bits_of(Float{}));

template <class Float>
LOWBIT_INLINE Float either(BitsOf<Float> mask, Float a, Float b) {
  return float_of(select(mask, bits_of(a), bits_of(b)));
}
template <class Float>
LOWBIT_INLINE BitsOf<Float> less(Float a, Float b) {
  return bit_and(at_least(b, a), bit_xor(at_least(a, b), like(bits_of(a), -1)));
}

// Levels of an integer format relative to its zero point: low <= code - zero <= high.
template <class Float>
struct LevelRange { Float low, high; };

template <class Float>
LOWBIT_INLINE LevelRange<Float> around(Float zero, float code_max) {
  return {sub(like(zero, 0.0f), zero), sub(like(zero, code_max), zero)};
}

// The integer nearest to y * inverse, which is below 2^22: adding 1.5 * 2^23 removes the fraction.
template <class Float>
LOWBIT_INLINE Float nearest_integer(Float y, Float inverse) {
  return sub(fma(y, inverse, like(y, 0x1.8p23f)), like(y, 0x1.8p23f));
}

// The level nearest to y * inverse; kWithin: known to be in range.
template <class Codec, bool kWithin = false, class Float>
LOWBIT_INLINE Float nearest_level(Float y, Float inverse, LevelRange<Float> range) {
  if constexpr (Codec::kind == CodecKind::lookup) return Codec::level_of(Codec::nearest(mul(y, inverse)));
  else if constexpr (kWithin) return nearest_integer(y, inverse);
  else return max(range.low, min(range.high, nearest_integer(y, inverse)));
}

template <class Float>
struct Sums { Float error, product, square; };  // sums of h (y - l u)^2, h y l, h l^2

// The error of scale u, and the two sums over its levels.
template <class Codec, bool kWeighted, class Group, class Float>
LOWBIT_INLINE Sums<Float> weigh(const Group& group, Float u, LevelRange<Float> range) {
  const Float inverse = div(like(u, 1.0f), u), none = like(u, 0.0f);
  Sums<Float> sums{none, none, none};
  for (int64_t i = 0; i < group.count; i++) {
    const Float y = group.y(i), level = nearest_level<Codec>(y, inverse, range), error = sub(y, mul(level, u)),
                h = like(u, kWeighted ? group.importance(i) : 1.0f), weighted = kWeighted ? mul(h, level) : level;
    sums.error = fma(kWeighted ? mul(h, error) : error, error, sums.error);
    sums.product = fma(weighted, y, sums.product), sums.square = fma(weighted, level, sums.square);
  }
  return sums;
}

// A scale, given by its inverse, and the range of its levels; sums over the group.
template <class Float>
struct Candidate {
  Float inverse;
  LevelRange<Float> range;
  Float product, square;

  template <class Codec, bool kWeighted, bool kWithin>
  LOWBIT_INLINE void add_weight(Float y, Float h) {
    const Float level = nearest_level<Codec, kWithin>(y, inverse, range), weighted = kWeighted ? mul(h, level) : level;
    product = fma(weighted, y, product), square = fma(weighted, level, square);
  }
};

// The best candidate so far: its sums, and the range of its levels.
template <class Float>
struct Best {
  Float product, square;
  LevelRange<Float> range;

  LOWBIT_INLINE void take(const Candidate<Float>& of) {
    const auto better = less(mul(mul(product, mul(product, like(product, kMargin))), of.square),
                             mul(mul(of.product, of.product), square));
    product = either(better, of.product, product), square = either(better, of.square, square);
    range = {either(better, of.range.low, range.low), either(better, of.range.high, range.high)};
  }
};

// Two candidates at a time: one load of a weight serves both.
template <class Codec, bool kWeighted, bool kWithin, class Group, class Float>
LOWBIT_NOINLINE void consider(const Group& group, const Candidate<Float>& first, const Candidate<Float>& second,
                              Best<Float>& best) {
  Candidate<Float> a = first, b = second;
  for (int64_t i = 0; i < group.count; i++) {
    const Float y = group.y(i), h = like(y, kWeighted ? group.importance(i) : 1.0f);
    a.template add_weight<Codec, kWeighted, kWithin>(y, h);
    b.template add_weight<Codec, kWeighted, kWithin>(y, h);
  }
  best.take(a), best.take(b);
}

// A group whose weights extend `down` below zero and `high` above it, in absmax scales; `own`: levels around
// its zero point.
template <class Float>
struct GroupRange {
  Float down, high;
  bool asymmetric;
  LevelRange<Float> own;
};

// The candidate with `count` steps, for a code with `levels`.
template <class Float>
LOWBIT_INLINE Candidate<Float> candidate(const GroupRange<Float>& of, float count, float levels, float code_max) {
  const Float none = like(of.high, 0.0f), width = of.asymmetric ? add(of.down, of.high) : max(of.down, of.high),
              inverse = div(like(none, count), max(like(none, 0x1p-100f), width));
  LevelRange<Float> range = of.own;
  if (of.asymmetric) {
    const int beyond = count > levels ? static_cast<int>((count - levels) / 2 + 0x1p-8f) : 0;  // clips evenly
    const Float at_zero = sub(nearest_integer(of.down, inverse), like(none, static_cast<float>(beyond)));
    range = around(max(none, min(like(none, code_max), at_zero)), code_max);
  }
  return {inverse, range, none, none};
}

// Steps are given as `count` fractions of `levels`, an even number of them.
template <class Codec, bool kWeighted, class Group, class Float>
LOWBIT_INLINE void consider_all(const Group& group, const float* steps, int count, float levels,
                                const GroupRange<Float>& group_range, Best<Float>& best) {
  for (int at = 0; at < count; at += 2) {
    const auto a = candidate(group_range, steps[at] * levels, levels, group.code_max),
               b = candidate(group_range, steps[at + 1] * levels, levels, group.code_max);
    if (Group::kSparesClamps && group.code_max >= 15 && at < kFirstWithin)
      consider<Codec, kWeighted, Group::kSparesClamps>(group, a, b, best);
    else consider<Codec, kWeighted, false>(group, a, b, best);
  }
}

// The choice for a group: the scale in units of `stored`, the zero point, and the error of absmax in its own scales.
template <class Float>
struct ChosenScale { Float scale, zero, absmax_error; };

// A scale rounded for storage: float16, relative to the power of two of its column. Per channel: float32 with 16
// significant bits, so that an equally short scale is reproduced exactly.
template <class Group, class Float>
LOWBIT_INLINE Float as_stored(const Group& group, Float scale, bool half_scales) {
  if (half_scales) return group.to_float16(scale);
  const auto bits = bits_of(scale);
  return float_of(bit_and(add(bits, like(bits, 0x80)), like(bits, ~0xff)));
}

// `stored`: the stored absmax scale; `zero`: its zero point; scales stay below `limit`.
template <class Codec, bool kWeighted, class Group, class Float>
LOWBIT_INLINE ChosenScale<Float> search(const Group& group, bool asymmetric, bool half_scales, Float stored, Float zero,
                                   Float limit) {
  constexpr bool kIntegers = Codec::kind == CodecKind::integer;
  const Float none = like(stored, 0.0f), one = like(stored, 1.0f);
  Float low = none, high = none;
  for (int64_t i = 0; i < group.count; i++) low = min(low, group.y(i)), high = max(high, group.y(i));
  const Float down = sub(none, low);

  // There is one more level below zero than above: the larger side gets it, with a negative scale if need be.
  const auto flip = kIntegers && !asymmetric ? less(down, high) : like(bits_of(none), 0);
  const LevelRange<Float> straight = around(zero, group.code_max),
                          own{either(flip, sub(none, straight.high), straight.low),
                              either(flip, sub(none, straight.low), straight.high)};
  const GroupRange<Float> group_range{down, high, asymmetric, own};
  Best<Float> best{none, one, own};
  if constexpr (kIntegers)
    consider_all<Codec, kWeighted>(group, asymmetric ? kAsymmetricSteps : kSymmetricSteps, 14,
                                   asymmetric ? group.code_max : (group.code_max + 1) / 2, group_range, best);
  else consider_all<Codec, kWeighted>(group, kLookupSteps, 8, Codec::range, group_range, best);

  Sums<Float> sums = weigh<Codec, kWeighted>(group, one, straight);
  ChosenScale<Float> choice{.scale = stored, .zero = zero, .absmax_error = sums.error};
  Float least = sums.error, product = best.product, square = best.square;
  for (int i = 0; i <= kRefits; i++) {
    const Float scale = as_stored(group, mul(div(product, square), stored), half_scales);
    sums = weigh<Codec, kWeighted>(group, div(scale, stored), best.range);
    const auto better = bit_and(less(sums.error, least), less(scale, limit));
    least = either(better, sums.error, least);
    choice.scale = either(better, either(flip, sub(none, scale), scale), choice.scale);
    choice.zero = either(better, asymmetric ? sub(none, best.range.low) : zero, choice.zero);
    product = sums.product, square = sums.square;
  }
  return choice;
}

}  // namespace
}  // namespace lowbit
