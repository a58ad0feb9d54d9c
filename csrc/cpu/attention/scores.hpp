// SPDX-License-Identifier: Apache-2.0
// The operations on a tile of scores between the two matrix products, except the softmax: score_mod, masks, dropout;
// also the exponential function.
#pragma once

#include "core/random.hpp"
#include "cpu/attention/call.hpp"
#include "cpu/attention/heads.hpp"
#include "cpu/score_program/vm.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

constexpr double kLog2e = 1.4426950408889634;
template <class T>
constexpr T kMinusInfinity = -static_cast<T>(__builtin_inf());

// e^x for x <= 88; 0 below -87.7 and at -inf; nan stays nan. Adding 1.5 * 2^23 + 127 to y = x log2(e) rounds it to an
// integer and leaves that, biased, in the low bits; 2^r of the remainder is a polynomial of degree 5 on [-1/2, 1/2],
// exact at 0: 1.4 ulp. x is a difference of scores, never a score: finfo.min of a mask times log2(e) is -inf.
LOWBIT_INLINE f32x16 e_to_the(f32x16 x) {
  x = max(set1(-88.0f), x);
  const f32x16 log2e = set1(static_cast<float>(kLog2e)), magic = set1(12583039.0f);
  const f32x16 biased = fma(x, log2e, magic), r = fma(x, log2e, sub(magic, biased));
  f32x16 p = fma(set1(1.3264717999845743e-3f), r, set1(9.671518579125404e-3f));
  p = fma(p, r, set1(5.550733953714371e-2f));
  p = fma(p, r, set1(2.4022242426872253e-1f));
  p = fma(p, r, set1(6.931470036506653e-1f));
  p = fma(p, r, set1(1.0f));
  return mul(p, float_of(shift_left<23>(bits_of(biased))));
}
LOWBIT_INLINE f64x16 e_to_the(f64x16 x) {
  for (double& lane : x.lane) lane = __builtin_exp(lane);
  return x;
}
template <class T>
LOWBIT_INLINE T e_to_the_one(T x) {
  if constexpr (sizeof(T) == 8) return __builtin_exp(x);
  T lanes[16];
  store(lanes, e_to_the(set1(x)));
  return lanes[0];
}
// base + log(total).
LOWBIT_INLINE float log_sum(float base, float total) { return base + __builtin_logf(total); }
LOWBIT_INLINE double log_sum(double base, double total) { return base + __builtin_log(total); }

// Position and size of a tile of scores.
struct TilePosition {
  int64_t b, h, q0, k0;
  int rows, cols;
  int skipped;   // rows of the tile of queries before q0
  bool partial;  // mask_mod must be evaluated
};

struct bool_byte { uint8_t value; };
LOWBIT_INLINE f32x16 load16(const bool_byte* p) {  // the term to add to a score: 0 or -inf
  const i32x16 no = sub(load_u8(&p->value), set1(int32_t{1}));
  return float_of(bit_and(no, set1(int32_t{static_cast<int32_t>(0xff800000)})));
}

template <class T, class E>
LOWBIT_INLINE T mask_value(E element) {
  if constexpr (std::is_same_v<E, bool_byte>) return element.value ? T{0} : kMinusInfinity<T>;
  else if constexpr (std::is_same_v<E, bfloat16_bits>) return static_cast<T>(float_from_bfloat16(element.bits));
  else if constexpr (std::is_same_v<E, float16_bits>) return static_cast<T>(float_from_float16(element.bits));
  else return static_cast<T>(element);
}

// scores += mask; false in a bool mask adds -inf.
template <class T, class E>
void add_mask_rows(const TensorView& mask, const TilePosition& at, Matrix<T> scores) {
  const E* base = mask.as<const E>() + at.b * mask.stride[0] + at.h * mask.stride[1] + at.q0 * mask.stride[2] +
                  at.k0 * mask.stride[3];
  constexpr bool kVectors = sizeof(T) == 4 && sizeof(E) <= 4;
  const int64_t step = mask.stride[3], dense = kVectors && step == 1 ? at.cols / 16 * 16 : 0;
  for (int64_t r = 0; r < at.rows; r++) {
    const E* from = base + r * mask.stride[2];
    T* to = scores.row(r);
    if constexpr (kVectors)
      for (int64_t c = 0; c < dense; c += 16) store(to + c, add(load(to + c), load16(from + c)));
    for (int64_t c = dense; c < at.cols; c++) to[c] += mask_value<T>(from[c * step]);
  }
}

template <class T>
void add_mask(const TensorView& mask, const TilePosition& at, Matrix<T> scores) {
  switch (mask.dtype) {
    case DType::boolean: return add_mask_rows<T, bool_byte>(mask, at, scores);
    case DType::bfloat16: return add_mask_rows<T, bfloat16_bits>(mask, at, scores);
    case DType::float16: return add_mask_rows<T, float16_bits>(mask, at, scores);
    case DType::float64: return add_mask_rows<T, double>(mask, at, scores);
    default: return add_mask_rows<T, float>(mask, at, scores);
  }
}

// The span without columns at its ends, in units of 16, that the mask hides from all rows of `at` in `heads` heads.
// Unchanged for a float64 mask or one not dense along the columns.
template <class E>
Span shown_columns(const TensorView& mask, const TilePosition& at, int64_t heads, Span span) {
  const int64_t of_heads = mask.stride[1] ? heads : 1, of_rows = mask.stride[2] ? at.rows : 1;
  Span shown{span.end, span.begin};
  const f32x16 no = set1(kMinusInfinity<float>);
  for (int64_t h = 0; h < of_heads; h++)
    for (int64_t r = 0; r < of_rows; r++) {
      const E* row = mask.as<const E>() + at.b * mask.stride[0] + (at.h + h) * mask.stride[1] +
                     (at.q0 + r) * mask.stride[2] + at.k0;
      const auto hidden = [&](int64_t c) { return c + 16 <= at.cols && all_at_most(load16(row + c), no); };
      int64_t begin = span.begin, end = span.end;
      while (begin < shown.begin && hidden(begin)) begin += 16;
      while (end > larger(shown.end, begin) && hidden(end - 16)) end -= 16;
      shown = {smaller(shown.begin, begin), larger(shown.end, end)};
    }
  return shown;
}

LOWBIT_INLINE Span shown_columns(const TensorView& mask, const TilePosition& at, int64_t heads, Span span) {
  if (mask.stride[3] != 1) return span;
  switch (mask.dtype) {
    case DType::boolean: return shown_columns<bool_byte>(mask, at, heads, span);
    case DType::bfloat16: return shown_columns<bfloat16_bits>(mask, at, heads, span);
    case DType::float16: return shown_columns<float16_bits>(mask, at, heads, span);
    case DType::float32: return shown_columns<float>(mask, at, heads, span);
    default: return span;
  }
}

// Existing columns of a row that causality and the window allow.
LOWBIT_INLINE Span visible_columns(const ForwardCall& args, const TilePosition& at, int64_t r) {
  const int64_t own = args.position + at.q0 + r - at.k0;
  return {args.window > 0 ? smaller(at.cols, larger(0, own - args.window + 1)) : 0,
          args.causal ? smaller(at.cols, larger(0, own + 1)) : at.cols};
}

LOWBIT_INLINE HeadView keys_of(const ForwardCall& args, int64_t b, int64_t kv_head) {
  return {args.k, args.k_scale, args.rotated, b, kv_head};
}
LOWBIT_INLINE HeadView values_of(const ForwardCall& args, int64_t b, int64_t kv_head) {
  return {args.v, args.v_scale, false, b, kv_head};
}

// Makes scores -inf where the mask is -inf.
LOWBIT_INLINE f32x16 hidden(f32x16 mask, f32x16 s) {
  return float_of(select(at_least(mask, set1(0.0f)), bits_of(s), bits_of(set1(kMinusInfinity<float>))));
}
LOWBIT_INLINE f64x16 hidden(f64x16 mask, f64x16 s) {
  for (int i = 0; i < 16; i++) s.lane[i] = mask.lane[i] >= 0 ? s.lane[i] : kMinusInfinity<double>;
  return s;
}

// One thread's machine for one plan of a program; an empty one without a program.
template <class T>
ScoreMachine<T> machine_for(const ScoreCall* call, const ScorePlan ScoreProgram::* plan, int64_t rows, int64_t cols,
                            TileArena& arena) {
  ScoreMachine<T> machine;
  if (!call || (call->program().*plan).empty()) return machine;
  machine.call = call, machine.plan = &(call->program().*plan);
  machine.max_rows = static_cast<int>(rows), machine.max_cols = static_cast<int>(cols);
  void* memory = arena.array<char>(
      static_cast<int64_t>(machine_bytes(*machine.plan, machine.max_rows, machine.max_cols, sizeof(T))));
  if (arena.base) start_machine(machine, memory);
  return machine;
}

template <class T>
LOWBIT_INLINE ScoreTile<T> score_tile(const TilePosition& at, Matrix<T> scores) {
  return {at.b, at.h, at.q0, at.k0, at.rows, at.cols, scores.data, scores.stride};
}

// The programs of a call.
template <class T>
struct Programs {
  ScoreMachine<T> score, mask;
  LOWBIT_INLINE Programs(const ForwardCall& args, int64_t rows, int64_t cols, TileArena& arena)
      : score(machine_for<T>(args.score_mod, &ScoreProgram::forward, rows, cols, arena)),
        mask(machine_for<T>(args.mask_mod, &ScoreProgram::forward, rows, cols, arena)) {}
};

// The dropout factors for the probabilities of one row: 0 or 1 / (1 - p).
template <class T>
void dropout_factors(const ForwardCall& args, const TilePosition& at, int64_t r, T* factor) {
  const uint64_t threshold = static_cast<uint64_t>(args.dropout_p * 0x1p32);
  const T kept = args.dropout_p < 1 ? static_cast<T>(1 / (1 - args.dropout_p)) : T{0};
  const uint32_t q = static_cast<uint32_t>(at.q0 + r), head = static_cast<uint32_t>(at.b * args.heads() + at.h);
  for (int64_t c = -(at.k0 % 4); c < at.cols; c += 4) {
    const auto words = philox4x32({static_cast<uint32_t>((at.k0 + c) / 4), q, head, 0},
                                  {static_cast<uint32_t>(args.key), static_cast<uint32_t>(args.key >> 32)});
    for (int64_t i = larger(0, -c); i < smaller(4, at.cols - c); i++)
      factor[c + i] = words[i] < threshold ? T{0} : kept;
  }
}

template <class T>
void drop_probabilities(const ForwardCall& args, const TilePosition& at, Matrix<T> scores, T* factor) {
  for (int64_t r = 0; r < at.rows; r++) {
    dropout_factors(args, at, r, factor);
    for (int64_t c = 0; c < at.cols; c += 16) store(scores.row(r) + c, mul(load(scores.row(r) + c), load(factor + c)));
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
