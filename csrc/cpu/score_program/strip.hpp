// SPDX-License-Identifier: Apache-2.0
// The ops of score/ops.hpp over a strip: rows x width elements, width a multiple of 16. The loops are plain; the
// compiler vectorizes them with the flags of each instruction set. An operand has one element per element of the strip,
// or one per row.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "score/ops.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Elements of row r: base[r * row_stride + c] for a vector, else base[r * row_stride] for every c. In cells.
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

// A result may overwrite its own operand, elementwise. clang's pragma also demands vectors, and warns of the loops that
// can have none because they call the C library (floor_divide: fmod).
#if defined(__clang__)
#define LOWBIT_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Wpass-failed"
#else
#define LOWBIT_INDEPENDENT _Pragma("GCC ivdep")
#endif

// Ops written with vectors of 16 because the compiler vectorizes the plain loop poorly: a minimum that propagates nan
// is one instruction here, five there.
template <class Op> struct ByHand { static constexpr bool exists = false; };

// tanh(x) = x P(x^2) / Q(x^2), lowest power first, fitted with a relative error of 1.5e-7 up to 8, where tanh is 1 -
// 2^-22 and is held: 4.5e-7 with rounding, and never above 1. One more power in P (2e-8 and 3.5e-7) takes a tenth
// longer; 1 - 2 / (e^2x + 1) takes three times as long (AVX2, Zen 5).
constexpr float kTanhEnd = 8, kTanhP[] = {0.99999988f, 1.2925666e-1f, 2.9510257e-3f, 1.1428442e-5f};
constexpr float kTanhQ[] = {1, 4.6258882e-1f, 2.3815563e-2f, 2.3866943e-4f, 2.4592163e-7f};
struct RationalTanh {
  f32x16 end, p[4], q[5];
  // Coefficients for c tanh(b x).
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

// An operand within a row: one element per result element, or one for all.
template <class Cell, bool vector>
struct Operand {
  const Cell* cells;
  Cell first;
  LOWBIT_INLINE explicit Operand(const Cell* cells) : cells(cells), first(*cells) {}
  LOWBIT_INLINE Cell at(int64_t i) const { return vector ? cells[i] : first; }
  LOWBIT_INLINE f32x16 vector_at(int64_t i) const { return vector ? load(cells + i) : set1(first); }
};

template <class Op, class T, class Out, class... Operands>
LOWBIT_INLINE void run_row(Out* out, int64_t width, Operands... operands) {
  if constexpr (kByHand<Op, T>) {
    for (int64_t i = 0; i < width; i += 16) store(out + i, ByHand<Op>::value(operands.vector_at(i)...));
  } else {
    LOWBIT_INDEPENDENT
    for (int64_t i = 0; i < width; i++) out[i] = static_cast<Out>(Op::value(operands.at(i)...));
  }
}

// mask: which operands are vectors.
template <class Op, class T, int mask, int... k>
LOWBIT_INLINE void run_rows(const Strip<T>& strip, std::integer_sequence<int, k...>) {
  using Out = ScoreCell<Op::types.back(), T>;
  const int64_t width = strip.width & ~15;
  for (int64_t r = 0; r < strip.rows; r++)
    run_row<Op, T>(reinterpret_cast<Out*>(strip.out + r * strip.out_stride), width,
                   Operand<ScoreCell<Op::types[k], T>, (mask >> k & 1) != 0>(
                       strip.in[k].template row<ScoreCell<Op::types[k], T>>(r))...);
}
template <class Op, class T, int mask>
void run_strip(const Strip<T>& strip) {
  run_rows<Op, T, mask>(strip, std::make_integer_sequence<int, arity_of<Op>()>());
}
#undef LOWBIT_INDEPENDENT
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

// A soft cap: b and c are constant per row, and usually for all rows, so their powers go into the coefficients. Nine
// products instead of eleven: 2.5 ns per 16 scores instead of 3.0 (AVX2, Zen 5).
[[maybe_unused]] void run_soft_cap(const Strip<float>& strip) {
  const float first_b = *strip.in[1].row<float>(0), magnitude = __builtin_fabsf(first_b);
  const bool uniform = strip.in[1].row_stride == 0 && strip.in[2].row_stride == 0;
  if (!uniform || !(magnitude > 0x1p-10f && magnitude < 0x1p10f))
    return run_strip<score::ScaledTanh, float, 1>(strip);  // powers would overflow a float
  const RationalTanh scaled(first_b, *strip.in[2].row<float>(0));
  for (int64_t r = 0; r < strip.rows; r++) {
    const float* a = strip.in[0].row<float>(r);
    for (int64_t i = 0; i < (strip.width & ~15); i += 16)
      store(strip.out + r * strip.out_stride + i, scaled(load(a + i)));
  }
}

// One kernel per op and set of vector operands. If all operands are one per row, so is the result, which belongs to
// another stage (except for a copy).
template <class T>
struct StripKernels {
  StripKernel<T> of[8];
};
template <class Op, class T, int mask>
constexpr StripKernel<T> strip_kernel() {
  if constexpr (mask == 0 && !std::is_same_v<Op, score::Copy>) return nullptr;
  else if constexpr (mask == 1 && std::is_same_v<Op, score::ScaledTanh> && sizeof(T) == 4) return run_soft_cap;
  else return run_strip<Op, T, mask>;
}
template <class Op, class T, int... mask>
constexpr StripKernels<T> strip_kernels(std::integer_sequence<int, mask...>) {
  if constexpr (has_value<Op>()) return {{strip_kernel<Op, T, mask>()...}};
  else return {};
}
template <class T, class... Ops>
constexpr std::array<StripKernels<T>, sizeof...(Ops)> all_strip_kernels(OpList<Ops...>) {
  return {strip_kernels<Ops, T>(std::make_integer_sequence<int, 1 << arity_of<Ops>()>())...};
}
template <class T>
constexpr auto kStripKernels = all_strip_kernels<T>(ScoreOps{});

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
