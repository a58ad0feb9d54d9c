// SPDX-License-Identifier: Apache-2.0
// The inner loops that benchmarks/arm/count.py counts: kernels of csrc/cpu/linear, of which each instruction set has
// those that it is the first choice for. A weight's kind is a constant here, so that no branch of a loop asks for it.
#include LOWBIT_ISA_HEADER

#ifdef LOWBIT_LOOPS_OF_neon_dot
#include "cpu/linear/dot_tile.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {

extern "C" [[gnu::flatten]] void int4_int8_one_row(PackedWeight weight, const Int8Rows<int8_t>& rows,
                                                   const Sink& sink) {
  weight.spec.group_size = 32, weight.spec.asymmetric = false;
  const Strip<Format::int4> strip(weight, sink, {0, 1}, nullptr, nullptr, 0, false);
  dot_tile<Format::int4, false, true, 1, 1>(strip, rows, sink, 0, nullptr, 0);
}
extern "C" [[gnu::flatten]] void int4_int8_rows(PackedWeight weight, const Int8Rows<int8_t>& rows, const Sink& sink,
                                                const uint8_t* codes) {
  weight.spec.group_size = 0, weight.spec.asymmetric = false;
  const Strip<Format::int4> strip(weight, sink, {0, 1}, nullptr, codes, 0, false);
  dot_tile<Format::int4, true, false, kDotRows, 1>(strip, rows, sink, 0, nullptr, 0);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
#endif

#ifdef LOWBIT_LOOPS_OF_neon
#include "cpu/linear/fma.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {

extern "C" [[gnu::flatten]] void float32_rows(const float* a, const float* b, int64_t k, float* c) {
  float_tile<kFloatRows, kFloatPanels>(a, b, 0, k, c, 16, false);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
#endif

#if defined(LOWBIT_LOOPS_OF_neon_i8mm) || defined(LOWBIT_LOOPS_OF_neon_bf16)
namespace lowbit::cpu::LOWBIT_ISA_NAME {

extern "C" void tile_steps(TileRows activations, TileRows weights, int64_t steps, TileSum (&sums)[256]) {
  const TileUnit unit(64);
  TileUnit::zero<0>();
  TileUnit::add_steps<0, 1>(activations, [&](int) { return weights; }, steps);
  TileUnit::store<0>(sums);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
#endif
