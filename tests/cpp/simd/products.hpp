// SPDX-License-Identifier: Apache-2.0
// Checks of the values of codes of weights, and of the exact products of codes: Dot4, Dot8, Dot8SemiSparse.
#pragma once

#include "loads_and_stores.hpp"

namespace {

void check_codes() {
  alignas(64) static const auto table = made<uint8_t, 16>([](int i) { return 255 - 3 * i; });
  whole(Function<u8x64(u8x64)>{"lookup16 u8x64(const uint8_t*, u8x64)",
                               [](u8x64 codes) { return lookup16(table.data(), Dot4::low(codes)); }},
        [](const auto& codes) { return made<uint8_t, 64>([&](int i) { return 255 - 3 * low_nibble(codes[i]); }); });
  for_each_number<4>([](auto n) {
    constexpr int kAt = n;
    whole(FUNCTION(int8_value<kAt>, f32x16(u8x64)), [](const auto& codes) {
      return made<float, 16>([&](int i) { return codes[4 * i + kAt] - 128; });
    });
  });
  for_each_number<8>([](auto n) {
    constexpr int kAt = n;
    whole(FUNCTION(int4_value<kAt>, f32x16(u8x64)), [](const auto& codes) {
      return made<float, 16>([&](int i) {
        const uint8_t byte = codes[4 * i + kAt / 2];
        return std::ldexp(static_cast<float>(kAt % 2 ? high_nibble(byte) : low_nibble(byte)), int4_shift(kAt));
      });
    });
  });
  report.checks("int4_shift int(int)");
  for_each_number<2>([](auto n) {
    constexpr int kAt = n;
    whole(FUNCTION(bf16_pair_value<kAt>, f32x16(u8x64)), [](const auto& codes) {
      return made<float, 16>([&](int i) {
        const uint8_t* pair = &codes[4 * i + 2 * kAt];
        return kBFloat16.read(static_cast<uint16_t>(pair[0] | pair[1] << 8));
      });
    });
  });
}

// Of a run of steps: all activations and codes at their limits, alternating, or drawn.
struct Drawn {
  Random random{13};
  int kind = 0;
  int activation(int k) {
    constexpr int kLimits[] = {127, -127, 0};
    return kind < 3 ? kLimits[kind] : kind == 3 ? (k % 2 ? 127 : -127) : static_cast<int>(random() % 255) - 127;
  }
  uint8_t code(int k) {
    constexpr uint8_t kLimits[] = {0xff, 0, 0x80, 0x7f};
    return kind < 12 ? kLimits[(kind + k * (kind / 4)) % 4] : static_cast<uint8_t>(random());
  }
};
constexpr int kKinds = 400;

// The four activations of a step as it wants them.
template <class Dot>
std::array<typename Dot::Step, 4> step_of(const std::array<int, 4>& a) {
  if constexpr (sizeof(typename Dot::Step) == 1) return made<typename Dot::Step, 4>([&](int k) { return a[k]; });
  else return made<typename Dot::Step, 4>([&](int k) { return a[std::array{0, 2, 1, 3}[k]]; });
}

// `steps` steps of four k onto a total; codes_of(row of codes) are a step's, value(byte) what a code is worth.
template <class Dot, class CodesOf, class Value>
void multiplies(const char* names[], int steps, CodesOf&& codes_of, Value&& value) {
  Drawn drawn;
  for (drawn.kind = 0; drawn.kind < kKinds; drawn.kind++) {
    auto total = made<int32_t, 16>([](int i) { return 1000 * i - 7; });
    auto wanted = total;
    std::vector<std::array<int, 4>> activations(steps);
    std::vector<std::array<uint8_t, 64>> codes(steps);
    for (int s = 0; s < steps; s++) {
      activations[s] = made<int, 4>([&](int k) { return drawn.activation(4 * s + k); });
      codes[s] = made<uint8_t, 64>([&](int k) { return drawn.code(k); });
      for (int i = 0; i < 16; i++)
        for (int k = 0; k < 4; k++) {
          wanted[i] += value(codes[s][4 * i + k]) * activations[s][k];
          total[i] -= Dot::kOffset * activations[s][k];
        }
    }
    auto acc = Dot::start(vector_of<i32x16>(total));
    for (int s = 0; s < steps; s++) {
      const auto a = step_of<Dot>(activations[s]);
      acc = Dot::step(acc, codes_of(vector_of<u8x64>(codes[s])), a.data());
    }
    const auto got = lanes_of(Dot::finish(vector_of<i32x16>(total), acc));
    for (int n = 0; names[n]; n++) {
      if (drawn.kind == 0) report.checks(names[n]);
      expect(names[n], wanted, got);
    }
  }
}

void check_dots() {
  const char* low[] = {"Dot4::low", "Dot4::start", "Dot4::step", "Dot4::finish", nullptr};
  multiplies<Dot4>(low, 8, [](u8x64 c) { return Dot4::low(c); }, low_nibble);  // 8 steps: more do not fit into 16 bits
  const char* high[] = {"Dot4::high", nullptr};
  multiplies<Dot4>(high, 8, [](u8x64 c) { return Dot4::high(c); }, high_nibble);
  const char* bytes[] = {"Dot8::codes", "Dot8::start", "Dot8::step", "Dot8::finish", nullptr};
  multiplies<Dot8>(bytes, 500, [](u8x64 c) { return Dot8::codes(c); }, [](uint8_t code) { return code - 128; });
}

void check_semi_sparse_dot() {
  const char *step = "Dot8SemiSparse::step", *offset = "Dot8SemiSparse::offset";
  report.checks(step), report.checks(offset);
  Drawn drawn;
  for (drawn.kind = 0; drawn.kind < kKinds; drawn.kind++) {
    const auto before = made<int32_t, 16>([](int i) { return 1000 * i - 7; });
    const auto codes = made<uint8_t, 64>([&](int k) { return drawn.code(k); });
    const auto places = made<int32_t, 16>([&](int) { return drawn.random() & 0x07070707; });
    const auto activations = made<int, 8>([&](int k) { return drawn.activation(k); });
    const auto stored = made<int8_t, 8>([&](int k) { return activations[k] + Dot8SemiSparse::kOffset; });
    const auto wanted = made<int32_t, 16>([&](int i) {
      int32_t sum = before[i];
      for (int slot = 0; slot < 4; slot++)
        sum += static_cast<int8_t>(codes[4 * i + slot]) * activations[places[i] >> 8 * slot & 7];
      return sum;
    });
    const u8x64 c = vector_of<u8x64>(codes);
    const i32x16 start = vector_of<i32x16>(before), where = vector_of<i32x16>(places);
    const auto sums = lanes_of(Dot8SemiSparse::step(start, c, where, stored.data())),
               too_much = lanes_of(Dot8SemiSparse::offset(start, c));
    const auto got = made<int32_t, 16>([&](int i) { return sums[i] - (too_much[i] - before[i]); });
    expect(step, wanted, got, places), expect(offset, wanted, got, places);
  }
}

}  // namespace
