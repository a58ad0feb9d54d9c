// SPDX-License-Identifier: Apache-2.0
// Checks of the functions of cpu/simd/ from vectors to vectors, and from the lanes of one vector to a number.
#pragma once

#include "harness.hpp"

namespace {

constexpr auto kPlus = [](auto a, auto b) { return a + b; };
constexpr auto kLarger = [](auto a, auto b) { return a > b ? a : b; };   // b if either is nan
constexpr auto kSmaller = [](auto a, auto b) { return a < b ? a : b; };
constexpr int32_t wrapped(uint32_t a) { return static_cast<int32_t>(a); }

constexpr auto kLargest = [](const auto& a) {
  auto most = a[0];
  for (auto lane : a) most = lane > most ? lane : most;
  return most;
};
constexpr auto kAllAtMost = [](const auto& a, const auto& b) {
  bool all = true;
  for (std::size_t i = 0; i < a.size(); i++) all = all && a[i] <= b[i];
  return all;
};
auto all_but_one_at_most() {  // or all: the lane that stays as it is may be none
  return [random = Random(5)](auto& a, auto& b) mutable {
    const std::size_t kept = random() % (2 * a.size());
    for (std::size_t i = 0; i < a.size(); i++) {
      if (i == kept) continue;
      if (b[i] != b[i]) b[i] = 1;
      if (!(a[i] <= b[i])) a[i] = b[i];
    }
  };
}
constexpr auto kNoNan = [](auto& a) {
  for (auto& lane : a) lane = lane == lane ? lane + 0 : 1;  // of -0 and 0 either may be the largest
};

void check_floats() {
  whole(FUNCTION(set1, f32x16(float)), [](auto a) { Lanes<f32x16> r; r.fill(a[0]); return r; });
  whole(FUNCTION(like, f32x16(f32x16, float)), [](auto, auto a) { Lanes<f32x16> r; r.fill(a[0]); return r; });
  lanewise(FUNCTION(add, f32x16(f32x16, f32x16)), kPlus);
  lanewise(FUNCTION(sub, f32x16(f32x16, f32x16)), [](float a, float b) { return a - b; });
  lanewise(FUNCTION(mul, f32x16(f32x16, f32x16)), [](float a, float b) { return a * b; });
  lanewise(FUNCTION(mul, f32x8(f32x8, f32x8)), [](float a, float b) { return a * b; });
  lanewise(FUNCTION(div, f32x16(f32x16, f32x16)), [](float a, float b) { return a / b; });
  lanewise(FUNCTION(fma, f32x16(f32x16, f32x16, f32x16)), [](float a, float b, float c) { return std::fma(a, b, c); });
  lanewise(FUNCTION(max, f32x16(f32x16, f32x16)), kLarger);
  lanewise(FUNCTION(min, f32x16(f32x16, f32x16)), kSmaller);
  lanewise(FUNCTION(sqrt, f32x16(f32x16)), [](float a) { return std::sqrt(a); });
  lanewise(FUNCTION(abs, f32x16(f32x16)), [](float a) { return std::fabs(a); });
  lanewise(FUNCTION(copysign, f32x16(f32x16, f32x16)), [](float a, float b) { return std::copysign(a, b); });
  lanewise(FUNCTION(to_float, f32x16(i32x16)), [](int32_t a) { return static_cast<float>(static_cast<double>(a)); });
  lanewise(FUNCTION(to_int, i32x16(f32x16)), [](float a) {
    const double nearest = std::nearbyint(static_cast<double>(a));
    return nearest >= -0x1p31 && nearest < 0x1p31 ? static_cast<int32_t>(nearest) : INT32_MIN;
  });
  lanewise(FUNCTION(times_power_of_two, f32x16(f32x16, i32x16)), [](float a, int32_t e) { return std::ldexp(a, e); },
           [](float&, int32_t& e) { e = within(e, -126, 127); });
  lanewise(FUNCTION(bits_of, i32x16(f32x16)), [](float a) { return std::bit_cast<int32_t>(a); });
  lanewise(FUNCTION(float_of, f32x16(i32x16)), [](int32_t a) { return std::bit_cast<float>(a); });
  lanewise(FUNCTION(at_least, i32x16(f32x16, f32x16)), [](float a, float b) { return a >= b ? -1 : 0; });
  lanewise(FUNCTION(in_register, f32x16(f32x16)), [](float a) { return a; });
}

struct Shifted {  // one type for all counts, which is less to compile
  int32_t (*by)(uint32_t, int);
  int count;
  int32_t operator()(int32_t a) const { return by(static_cast<uint32_t>(a), count); }
};

void check_integers() {
  whole(FUNCTION(set1, i32x16(int32_t)), [](auto a) { Lanes<i32x16> r; r.fill(a[0]); return r; });
  whole(FUNCTION(like, i32x16(i32x16, int32_t)), [](auto, auto a) { Lanes<i32x16> r; r.fill(a[0]); return r; });
  lanewise(FUNCTION(add, i32x16(i32x16, i32x16)), [](uint32_t a, uint32_t b) { return wrapped(a + b); });
  lanewise(FUNCTION(sub, i32x16(i32x16, i32x16)), [](uint32_t a, uint32_t b) { return wrapped(a - b); });
  lanewise(FUNCTION(mul, i32x16(i32x16, i32x16)), [](uint32_t a, uint32_t b) { return wrapped(a * b); });
  lanewise(FUNCTION(max, i32x16(i32x16, i32x16)), kLarger);
  lanewise(FUNCTION(min, i32x16(i32x16, i32x16)), kSmaller);
  lanewise(FUNCTION(max_u32, i32x16(i32x16, i32x16)), [](uint32_t a, uint32_t b) { return wrapped(kLarger(a, b)); });
  lanewise(FUNCTION(bit_and, i32x16(i32x16, i32x16)), [](int32_t a, int32_t b) { return a & b; });
  lanewise(FUNCTION(bit_or, i32x16(i32x16, i32x16)), [](int32_t a, int32_t b) { return a | b; });
  lanewise(FUNCTION(bit_xor, i32x16(i32x16, i32x16)), [](int32_t a, int32_t b) { return a ^ b; });
  for_each_number<32>([](auto n) {
    constexpr int kCount = n;
    lanewise(FUNCTION(shift_left<kCount>, i32x16(i32x16)),
             Shifted{[](uint32_t a, int n) { return wrapped(a << n); }, n});
    lanewise(FUNCTION(shift_right<kCount>, i32x16(i32x16)),
             Shifted{[](uint32_t a, int n) { return wrapped(a >> n); }, n});
    lanewise(FUNCTION(shift_right_signed<kCount>, i32x16(i32x16)),
             Shifted{[](uint32_t a, int n) { return static_cast<int32_t>(a) >> n; }, n});
  });
  lanewise(FUNCTION(shift_right, i32x16(i32x16, i32x16)),
           [](uint32_t a, uint32_t count) { return count < 32 ? wrapped(a >> count) : 0; });
  lanewise(FUNCTION(select, i32x16(i32x16, i32x16, i32x16)),
           [](int32_t mask, int32_t a, int32_t b) { return mask ? a : b; },
           [](int32_t& mask, int32_t&, int32_t&) { mask = mask & 1 ? -1 : 0; });
  lanewise(FUNCTION(mul_high_u16, i32x16(i32x16, i32x16)),
           [](uint32_t a, uint32_t b) { return wrapped((a >> 16) * (b >> 16) & 0xffff0000u); },
           [](int32_t&, int32_t& b) { b &= wrapped(0xffff0000u); });
  lanewise(FUNCTION(sub_saturating_u16, i32x16(i32x16, i32x16)),
           [](uint32_t a, uint32_t b) { return a >> 16 > b >> 16 ? wrapped(((a >> 16) - (b >> 16)) << 16) : 0; },
           [](int32_t& a, int32_t&) { a &= wrapped(0xffff0000u); });
  lanewise(FUNCTION(count_down_above, i32x16(i32x16, f32x16, f32x16)),
           [](int32_t n, float a, float b) { return wrapped(static_cast<uint32_t>(n) - (a > b)); },
           [](int32_t&, float& a, float& b) { for (float* x : {&a, &b}) *x = *x == *x ? std::fabs(*x) : 1; });
  lanewise(FUNCTION(negate_where_negative, i32x16(i32x16, f32x16)),
           [](int32_t a, float b) { return std::signbit(b) ? -a : a; },
           [](int32_t& a, float& b) {  // of 0, whose lane may be a or 0, only with a = 0
             if (a == INT32_MIN) a = 1;
             if (std::bit_cast<int32_t>(b) == 0) a = 0;
           });
  whole(FUNCTION(words_of, i32x16(u8x64)), [](auto a) { return std::bit_cast<Lanes<i32x16>>(a); });
}

void check_reductions() {
  whole(FUNCTION(sum, float(f32x16)), [](auto a) {
    for (int count = 8; count; count /= 2) for (int i = 0; i < count; i++) a[i] += a[i + count];
    return a[0];
  });
  whole(FUNCTION(sum, int32_t(i32x16)), [](auto a) {
    int32_t sum = 0;
    for (int32_t lane : a) sum += lane;
    return sum;
  }, [](auto& a) { for (int32_t& lane : a) lane = within(lane, -(1 << 27), (1 << 27) - 1); });
  whole(FUNCTION(largest, float(f32x16)), kLargest, kNoNan);
  whole(FUNCTION(largest, int32_t(i32x16)), kLargest);
  whole(FUNCTION(all_at_most, bool(f32x16, f32x16)), kAllAtMost, all_but_one_at_most());
  for (const int bits : {1, 0x80, 0x88, 0xff})
    whole(FUNCTION(all_bytes_have, bool(i32x16, int)), [](auto a, auto bits) {
      bool all = true;
      for (int32_t lane : a) for (int byte = 0; byte < 4; byte++) all = all && (lane >> 8 * byte & bits[0]);
      return all;
    }, [&, random = Random(3)](auto& a, auto& given) mutable {  // all have them, or all bytes but one
      given[0] = bits;
      for (int32_t& lane : a) lane |= bits * 0x01010101;
      if (random() & 1) a[random() % 16] &= ~(bits << random() % 4 * 8);
    });
}

void check_doubles() {
  whole(FUNCTION(set1, f64x16(double)), [](auto a) { Lanes<f64x16> r; r.fill(a[0]); return r; });
  lanewise(FUNCTION(add, f64x16(f64x16, f64x16)), kPlus);
  lanewise(FUNCTION(sub, f64x16(f64x16, f64x16)), [](double a, double b) { return a - b; });
  lanewise(FUNCTION(mul, f64x16(f64x16, f64x16)), [](double a, double b) { return a * b; });
  lanewise(FUNCTION(fma, f64x16(f64x16, f64x16, f64x16)), [](double a, double b, double c) { return a * b + c; });
  lanewise(FUNCTION(max, f64x16(f64x16, f64x16)), kLarger);
  whole(FUNCTION(largest, double(f64x16)), kLargest, kNoNan);
  whole(FUNCTION(all_at_most, bool(f64x16, f64x16)), kAllAtMost, all_but_one_at_most());
  whole(FUNCTION(sum, double(f64x16)), [](auto a) {
    double sum = 0;
    for (double lane : a) sum += lane;
    return sum;
  });
}

}  // namespace
