// SPDX-License-Identifier: Apache-2.0
// The ops of score/ops.hpp over a strip: rows x width elements, width a multiple of 16. The loops are plain; the
// compiler makes vectors of them with the flags of each instruction set. An operand has either one element for each
// element of the strip, or one for a whole row.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "score/ops.hpp"

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

// Ops over the vector of 16, where the compiler makes poor vectors of the plain loop: a minimum that keeps nan is one
// instruction here, five there.
template <class Op> struct ByHand { static constexpr bool exists = false; };

// tanh(x) = x P(x^2) / Q(x^2), lowest power first, fitted with relative error 1.5e-7 up to 8, where tanh is 1 - 2^-22
// and is left: with rounding 4.5e-7, and never above 1. One power more in P, for 2e-8 and 3.5e-7, costs a tenth more
// time; 1 - 2 / (e^2x + 1) costs three times as much.
constexpr float kTanhEnd = 8, kTanhP[] = {0.99999988f, 1.2925666e-1f, 2.9510257e-3f, 1.1428442e-5f};
constexpr float kTanhQ[] = {1, 4.6258882e-1f, 2.3815563e-2f, 2.3866943e-4f, 2.4592163e-7f};
struct RationalTanh {
  f32x16 end, p[4], q[5];
  // Coefficients of c tanh(b x).
  LOWBIT_INLINE RationalTanh(float b, float c) {
    float power = 1;
    for (int i = 0; i < 5; i++, power *= b * b) q[i] = set1(kTanhQ[i] * power);
    power = b * c;
    for (int i = 0; i < 4; i++, power *= b * b) p[i] = set1(kTanhP[i] * power);
    end = set1(kTanhEnd / __builtin_fabsf(b));
  }
  LOWBIT_INLINE f32x16 operator()(f32x16 x) const {
    x = max(sub(set1(0.0f), end), min(end, x));
    const f32x16 s = mul(x, x);
    const f32x16 over = fma(fma(fma(p[3], s, p[2]), s, p[1]), s, p[0]),
                 under = fma(fma(fma(fma(q[4], s, q[3]), s, q[2]), s, q[1]), s, q[0]);
    return div(mul(x, over), under);
  }
};
template <> struct ByHand<score::Tanh> {
  static constexpr bool exists = true;
  LOWBIT_INLINE static f32x16 value(f32x16 a) { return RationalTanh(1, 1)(a); }
};
template <> struct ByHand<score::ScaledTanh> {
  static constexpr bool exists = true;
  LOWBIT_INLINE static f32x16 value(f32x16 a, f32x16 b, f32x16 c) { return mul(RationalTanh(1, 1)(mul(a, b)), c); }
};
template <class Op, class T>
constexpr bool kByHand = sizeof(T) == 4 && ByHand<Op>::exists;

template <class Op, class T, int mask>
void run_strip1(const Strip<T>& strip) {
  using A = ScoreCell<Op::types[0], T>;
  using Out = ScoreCell<Op::types[2], T>;
  const int64_t width = strip.width & ~15;
  for (int64_t r = 0; r < strip.rows; r++) {
    const A* a = strip.in[0].template row<A>(r);
    const A a0 = *a;
    Out* out = reinterpret_cast<Out*>(strip.out + r * strip.out_stride);
    if constexpr (kByHand<Op, T>) {
      for (int64_t i = 0; i < width; i += 16) store(out + i, ByHand<Op>::value(load(a + i)));
    } else {
      LOWBIT_INDEPENDENT
      for (int64_t i = 0; i < width; i++) out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0));
    }
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
    for (int64_t i = 0; i < width; i++)
      out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0, mask & 2 ? b[i] : b0));
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
    if constexpr (kByHand<Op, T>) {
      for (int64_t i = 0; i < width; i += 16)
        store(out + i, ByHand<Op>::value(mask & 1 ? load(a + i) : set1(a0), mask & 2 ? load(b + i) : set1(b0),
                                         mask & 4 ? load(c + i) : set1(c0)));
    } else {
      LOWBIT_INDEPENDENT
      for (int64_t i = 0; i < width; i++)
        out[i] = static_cast<Out>(Op::value(mask & 1 ? a[i] : a0, mask & 2 ? b[i] : b0, mask & 4 ? c[i] : c0));
    }
  }
}
#undef LOWBIT_INDEPENDENT

// A soft cap: one b and c for a row, mostly for all, whose powers go into the coefficients. Nine products where eleven
// were: 2.5 ns per 16 scores, not 3.0.
[[maybe_unused]] void run_soft_cap(const Strip<float>& strip) {
  const float first_b = *strip.in[1].row<float>(0), magnitude = __builtin_fabsf(first_b);
  const bool uniform = strip.in[1].row_stride == 0 && strip.in[2].row_stride == 0;
  if (!uniform || !(magnitude > 0x1p-10f && magnitude < 0x1p10f))
    return run_strip3<score::ScaledTanh, float, 1>(strip);  // powers would leave the floats
  const RationalTanh scaled(first_b, *strip.in[2].row<float>(0));
  for (int64_t r = 0; r < strip.rows; r++) {
    const float* a = strip.in[0].row<float>(r);
    for (int64_t i = 0; i < (strip.width & ~15); i += 16)
      store(strip.out + r * strip.out_stride + i, scaled(load(a + i)));
  }
}

// Per op one kernel for each set of vector operands. All operands one per row: the result is too, and has a stage of
// its own (but for a copy).
template <class T>
struct StripKernels {
  StripKernel<T> of[8];
};
template <class Op, class T>
constexpr StripKernels<T> strip_kernels() {
  if constexpr (std::is_same_v<Op, score::ScaledTanh> && sizeof(T) == 4)
    return {{nullptr, run_soft_cap, run_strip3<Op, T, 2>, run_strip3<Op, T, 3>, run_strip3<Op, T, 4>,
             run_strip3<Op, T, 5>, run_strip3<Op, T, 6>, run_strip3<Op, T, 7>}};
  else if constexpr (std::is_same_v<Op, score::Copy>) return {{run_strip1<Op, T, 0>, run_strip1<Op, T, 1>}};
  else if constexpr (!has_value<Op>()) return {};
  else if constexpr (arity_of<Op>() == 1) return {{nullptr, run_strip1<Op, T, 1>}};
  else if constexpr (arity_of<Op>() == 2)
    return {{nullptr, run_strip2<Op, T, 1>, run_strip2<Op, T, 2>, run_strip2<Op, T, 3>}};
  else
    return {{nullptr, run_strip3<Op, T, 1>, run_strip3<Op, T, 2>, run_strip3<Op, T, 3>, run_strip3<Op, T, 4>,
             run_strip3<Op, T, 5>, run_strip3<Op, T, 6>, run_strip3<Op, T, 7>}};
}
template <class T, class... Ops>
constexpr std::array<StripKernels<T>, sizeof...(Ops)> all_strip_kernels(OpList<Ops...>) {
  return {strip_kernels<Ops, T>()...};
}
template <class T>
constexpr auto kStripKernels = all_strip_kernels<T>(ScoreOps{});

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
