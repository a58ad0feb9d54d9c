// SPDX-License-Identifier: Apache-2.0
// The peak rate of byte products, four of which are added at a time: accumulators in registers, one set of codes.
#include LOWBIT_ISA_HEADER

#include "cpu/loops.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int kSums = kDotRows * kDotPanels;

int64_t run_dot(int64_t rounds) {
  alignas(64) uint8_t bytes[64] = {};
  for (int i = 0; i < 64; i++) bytes[i] = static_cast<uint8_t>(rounds >> (i % 8));
  const Dot4::Step factors[4 * kSums] = {};  // zeros: accumulators never overflow
  const Dot4::Step* at = factors;
  const Dot4::Codes codes = Dot4::low(load_codes(bytes));
  Dot4::Acc sums[kSums];
  unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = Dot4::start(set1(int32_t{i})); });
  for (int64_t round = 0; round < rounds; round++) {
    asm volatile("" : "+r"(at) : : "memory");  // else products of zeros are moved out of the loop, and equal sums are one
    unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = Dot4::step(sums[i], codes, at + 4 * i); });
  }
  int32_t total = 0;
  unroll<kSums>([&](auto i) __attribute__((always_inline)) {
    total += sum(Dot4::finish(set1(int32_t{0}), sums[i]));
  });
  return rounds * kSums * 64 * 2 + (total < 0 ? 1 : 0);
}

constexpr Peak kDot{Arithmetic::integer, LOWBIT_ROW("int8 products"), run_dot};

}  // namespace

void peak_dot_rows(Backend& backend) { add_peak(backend, kDot); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
