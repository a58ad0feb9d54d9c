// SPDX-License-Identifier: Apache-2.0
// The peak rate of float32 FMAs, with as many accumulators as a register tile of linear.
#include LOWBIT_ISA_HEADER

#include "cpu/loops.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr int kSums = kFloatRows * kFloatPanels < 16 ? kFloatRows * kFloatPanels : 16;

int64_t run_fma(int64_t rounds) {
  const f32x16 factor = set1(0.5f), addend = set1(static_cast<float>(rounds));
  alignas(64) float lanes[16 * kSums];  // all different: where a vector is two registers, equal ones would be one
  for (int i = 0; i < 16 * kSums; i++) lanes[i] = static_cast<float>(rounds + i);
  f32x16 sums[kSums];
  unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = load(lanes + 16 * i); });
  for (int64_t round = 0; round < rounds; round++)
    unroll<kSums>([&](auto i) __attribute__((always_inline)) { sums[i] = fma(sums[i], factor, addend); });
  float total = 0;
  unroll<kSums>([&](auto i) __attribute__((always_inline)) { total += sum(sums[i]); });
  return rounds * kSums * 16 * 2 + (total < 0 ? 1 : 0);  // uses the sum, so that it is computed
}

constexpr Peak kFma{Arithmetic::floating, LOWBIT_ROW("float32 FMA"), run_fma};

}  // namespace

void peak_fma_rows(Backend& backend) { add_peak(backend, kFma); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
