// SPDX-License-Identifier: Apache-2.0
// float16 and bfloat16 as the checks of cpu/simd/ know them: in double arithmetic, and not by bits as core/dtype.hpp.
#pragma once

#include "memory.hpp"

namespace {

// The 16-bit float of `exponent_bits` in double arithmetic: to nearest, ties to even, subnormals too.
struct SixteenBits {
  int exponent_bits;
  int fraction_bits() const { return 15 - exponent_bits; }
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  int all_ones() const { return (1 << exponent_bits) - 1; }

  float read(uint16_t code) const {
    const int fraction = code & ((1 << fraction_bits()) - 1), exponent = code >> fraction_bits() & all_ones();
    double value = exponent == 0 ? std::ldexp(fraction, 1 - bias() - fraction_bits())
                                 : std::ldexp((1 << fraction_bits()) + fraction, exponent - bias() - fraction_bits());
    if (exponent == all_ones()) value = fraction ? NAN : INFINITY;
    return static_cast<float>(code >> 15 ? -value : value);
  }
  uint16_t written(float x) const {
    const int sign = std::signbit(x) ? 0x8000 : 0;
    if (x != x) return static_cast<uint16_t>(sign | (all_ones() << fraction_bits()) | 1 << (fraction_bits() - 1));
    if (std::isinf(x)) return static_cast<uint16_t>(sign | all_ones() << fraction_bits());
    const double a = std::fabs(static_cast<double>(x));
    int exponent = 1 - bias();
    if (a != 0 && std::ilogb(a) > exponent) exponent = std::ilogb(a);
    // In steps of the last place. A sum carries on into the exponent, and behind the last into infinity.
    const double steps = std::nearbyint(std::ldexp(a, fraction_bits() - exponent));
    const int64_t code = static_cast<int64_t>(steps) + (int64_t{exponent + bias() - 1} << fraction_bits());
    const int64_t infinity = all_ones() << fraction_bits();
    return static_cast<uint16_t>(sign | (code < infinity ? code : infinity));
  }
};
constexpr SixteenBits kFloat16{5}, kBFloat16{8};

// Every 16-bit float, the middle to the next one, and the float32 on both sides of each.
std::vector<float> floats_about(const SixteenBits& format) {
  std::vector<float> all;
  for (int code = 0; code < 1 << 16; code++) {
    const float x = format.read(static_cast<uint16_t>(code));
    if (!std::isfinite(x)) continue;
    const float beyond = 1 + std::ldexp(0.25f, -format.fraction_bits());
    const float next = format.read(static_cast<uint16_t>(code + 1)),
                middle = std::isfinite(next) ? x + (next - x) / 2 : x * beyond;
    for (const float f : {x, middle})
      for (const float to : {-INFINITY, f, INFINITY}) all.push_back(to == f ? f : std::nextafter(f, to));
  }
  return all;
}
// A nan keeps its sign, is quiet, and may keep its payload: written as the one nan of the reference.
uint16_t one_nan(const SixteenBits& format, uint16_t code) {
  const int fraction = code & ((1 << format.fraction_bits()) - 1), quiet = 1 << (format.fraction_bits() - 1);
  const bool nan = (code >> format.fraction_bits() & format.all_ones()) == format.all_ones() && fraction & quiet;
  return nan ? static_cast<uint16_t>((code & ~((quiet << 1) - 1)) | quiet) : code;
}

// f(p, a) writes 16 floats of `format`, f(p, a, b) 32.
template <class... A>
void stores_sixteen_bits(Function<void(uint16_t*, A...)> f, const SixteenBits& format, bool flushes = false) {
  report.checks(f.text);
  constexpr std::size_t kCount = 16 * sizeof...(A);
  std::vector<float> floats = floats_about(format);
  Arguments<float> more;
  for (uint64_t i = 0; i < more.count(); i++) floats.push_back(std::get<0>(more.at(i)));
  floats.resize(floats.size() / kCount * kCount);
  Guarded memory;
  for (std::size_t i = 0; i < floats.size(); i += kCount) {
    std::array<float, kCount> given;
    std::memcpy(given.data(), &floats[i], sizeof given);
    const auto wanted = made<uint16_t, kCount>([&](std::size_t n) {
      return format.written(flushes && std::fabs(given[n]) < 0x1p-126f ? std::copysign(0.0f, given[n]) : given[n]);
    });
    memory.at_each_place<uint16_t>(kCount, [&](uint16_t* to) {
      [&]<std::size_t... n>(std::index_sequence<n...>) {
        f.call(to, std::bit_cast<std::array<A, sizeof...(A)>>(given)[n]...);
      }(std::index_sequence_for<A...>{});
      expect(f.text, wanted, made<uint16_t, kCount>([&](std::size_t n) { return one_nan(format, to[n]); }), given);
      if (!memory.only_changed(to, sizeof wanted) && report.fails(f.text))
        std::printf("it writes more than its elements\n");
    });
  }
}

}  // namespace
