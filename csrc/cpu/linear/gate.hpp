// SPDX-License-Identifier: Apache-2.0
// act(gate, up) of accumulated sums: the rows of the next product. The sums of a task are in scratch memory, all
// columns of a panel: the panels of its gates, then those of its ups, or both interleaved.
#pragma once

#include "cpu/linear/epilogue.hpp"
#include "ops/experts.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

LOWBIT_INLINE f32x16 activated(const Gate& gate, f32x16 x) {
  switch (gate.activation) {
    case ExpertActivation::none: return x;
    case ExpertActivation::relu: return relu(x);
    case ExpertActivation::gelu: return gelu(x);
    case ExpertActivation::gelu_tanh: return gelu_tanh(x);
    case ExpertActivation::silu: return mul(x, sigmoid(mul(set1(gate.alpha), x)));
    case ExpertActivation::relu_squared: return mul(relu(x), relu(x));
  }
  __builtin_unreachable();
}

LOWBIT_INLINE f32x16 gated(const Gate& gate, f32x16 x, f32x16 up) {
  if (gate.limit != 0.0f) {  // this operand order keeps nan
    x = min(set1(gate.limit), x);
    up = max(set1(-gate.limit), min(set1(gate.limit), up));
  }
  return mul(activated(gate, x), add(up, set1(gate.up_offset)));
}

// The panels of gate_up for columns `columns` of the next product, which begin at a multiple of 16.
struct GatePanels {
  Span gates, ups;  // ups: empty if interleaved, or without a gate
  int64_t up_column = 0;  // column of the first up within the panels `ups`

  GatePanels(const Gate& gate, int64_t all, Span columns) : gates(panels(columns)), ups{0, 0} {
    if (gate.interleaved) gates = panels({2 * columns.begin, 2 * columns.end});
    else if (gate.gated) ups = panels({all + columns.begin, all + columns.end}), up_column = all % kPanelColumns;
  }
  int64_t stride() const { return (gates.count() + ups.count()) * kPanelColumns; }

 private:
  static Span panels(Span columns) { return {columns.begin / kPanelColumns, ceil_div(columns.end, kPanelColumns)}; }
};

// One of these rows, from column `at` on to y[y_at].., `count` columns.
LOWBIT_INLINE void gate_row(const Gate& gate, const GatePanels& panels, const float* sums, int64_t count, void* y,
                            DType dtype, int64_t y_at) {
  const float* ups = sums + panels.gates.count() * kPanelColumns + panels.up_column;
  for (int64_t i = 0; i < count; i += 16) {
    f32x16 value;
    if (gate.interleaved) {
      alignas(64) float each[2][16] = {};
      const int64_t left = smaller(16, count - i);
      for (int64_t c = 0; c < left; c++) each[0][c] = sums[2 * (i + c)], each[1][c] = sums[2 * (i + c) + 1];
      value = gated(gate, load(each[0]), load(each[1]));
    } else {
      value = gate.gated ? gated(gate, load(sums + i), load(ups + i)) : activated(gate, load(sums + i));
    }
    store_from_float(y, dtype, y_at + i, count - i, value);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
