// SPDX-License-Identifier: Apache-2.0
// The ops of rules/score_ops.hpp over a strip: rows x width elements, width a multiple of 16. The loops are plain; the compiler makes vectors of
// them with the flags of each instruction set. An operand is either one element per element, or one for a whole row.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "rules/score_ops.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Elements of row r: vector: base[r * row_stride + c]; else base[r * row_stride] for every c. In cells.
template <class T>
struct Source {
  const T* base;
  int64_t row_stride;
  bool vector;

  template <class Cell>
  LOWBIT_INLINE const Cell* row(int64_t r) const { return reinterpret_cast<const Cell*>(base + r * row_stride); }
};

template <class T>
struct Strip {
  Source<T> in[3];
  T* out;
  int64_t out_stride;
  int rows, width;
};
template <class T>
using StripKernel = void (*)(const Strip<T>&);

#if defined(__clang__)
#define LOWBIT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define LOWBIT_INDEPENDENT _Pragma("GCC ivdep")  // a result may overwrite its own operand, element by element
#endif

template <class Op, class T, int mask>
void run_strip1(const Strip<T>& strip) {
  using A = ScoreCell<Op::types[0], T>;
  using Out = ScoreCell<Op::types[2], T>;
  const int64_t width = strip.width & ~15;
  for (int64_t r = 0; r < strip.rows; r++) {
    const A* a = strip.in[0].template row<A>(r);
    const A a0 = *a;
    Out* out = reinterpret_cast<Out*>(strip.out + r * strip.out_stride);
    LOWBIT_INDEPENDENT
    for (int64_t i = 0; i < width; i++) out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0));
  }
}

template <class Op, class T, int mask>
void run_strip2(const Strip<T>& strip) {
  using A = ScoreCell<Op::types[0], T>;
  using B = ScoreCell<Op::types[1], T>;
  using Out = ScoreCell<Op::types[3], T>;
  const int64_t width = strip.width & ~15;
  for (int64_t r = 0; r < strip.rows; r++) {
    const A* a = strip.in[0].template row<A>(r);
    const B* b = strip.in[1].template row<B>(r);
    const A a0 = *a;
    const B b0 = *b;
    Out* out = reinterpret_cast<Out*>(strip.out + r * strip.out_stride);
    LOWBIT_INDEPENDENT
    for (int64_t i = 0; i < width; i++) out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0, mask & 2 ? b[i] : b0));
  }
}

template <class Op, class T, int mask>
void run_strip3(const Strip<T>& strip) {
  using A = ScoreCell<Op::types[0], T>;
  using B = ScoreCell<Op::types[1], T>;
  using C = ScoreCell<Op::types[2], T>;
  using Out = ScoreCell<Op::types[4], T>;
  const int64_t width = strip.width & ~15;
  for (int64_t r = 0; r < strip.rows; r++) {
    const A* a = strip.in[0].template row<A>(r);
    const B* b = strip.in[1].template row<B>(r);
    const C* c = strip.in[2].template row<C>(r);
    const A a0 = *a;
    const B b0 = *b;
    const C c0 = *c;
    Out* out = reinterpret_cast<Out*>(strip.out + r * strip.out_stride);
    LOWBIT_INDEPENDENT
    for (int64_t i = 0; i < width; i++)
      out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0, mask & 2 ? b[i] : b0, mask & 4 ? c[i] : c0));
  }
}
#undef LOWBIT_INDEPENDENT

// Per op one kernel for each set of vector operands. All operands one per row: the result is too, and has a stage of its own (but for a copy).
template <class T>
struct StripKernels {
  StripKernel<T> of[8];
};
template <class Op, class T>
constexpr StripKernels<T> strip_kernels() {
  if constexpr (std::is_same_v<Op, score::Copy>) return {{run_strip1<Op, T, 0>, run_strip1<Op, T, 1>}};
  else if constexpr (!has_value<Op>()) return {};
  else if constexpr (arity_of<Op>() == 1) return {{nullptr, run_strip1<Op, T, 1>}};
  else if constexpr (arity_of<Op>() == 2) return {{nullptr, run_strip2<Op, T, 1>, run_strip2<Op, T, 2>, run_strip2<Op, T, 3>}};
  else return {{nullptr, run_strip3<Op, T, 1>, run_strip3<Op, T, 2>, run_strip3<Op, T, 3>, run_strip3<Op, T, 4>, run_strip3<Op, T, 5>,
                run_strip3<Op, T, 6>, run_strip3<Op, T, 7>}};
}
template <class T, class... Ops>
constexpr std::array<StripKernels<T>, sizeof...(Ops)> all_strip_kernels(OpList<Ops...>) { return {strip_kernels<Ops, T>()...}; }
template <class T>
constexpr auto kStripKernels = all_strip_kernels<T>(ScoreOps{});

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
