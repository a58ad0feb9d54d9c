// SPDX-License-Identifier: Apache-2.0
// The functions that the header of an instruction set must provide, as concepts checked at its end: the compiler then
// names the missing function instead of a kernel that uses it. Semantics: scalar.hpp.
#pragma once

#include <concepts>
#include <cstdint>

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <class Vector, class Element>
concept Arithmetic = requires(Vector a, Element e) {
  { set1(e) } -> std::same_as<Vector>;
  { add(a, a) } -> std::same_as<Vector>;
  { sub(a, a) } -> std::same_as<Vector>;
  { mul(a, a) } -> std::same_as<Vector>;
  { min(a, a) } -> std::same_as<Vector>;
  { max(a, a) } -> std::same_as<Vector>;
  { sum(a) } -> std::same_as<Element>;
  { largest(a) } -> std::same_as<Element>;
};

template <class Floats, class Ints>
concept FloatLanes = Arithmetic<Floats, float> && requires(Floats a, Ints i) {
  { div(a, a) } -> std::same_as<Floats>;
  { fma(a, a, a) } -> std::same_as<Floats>;
  { sqrt(a) } -> std::same_as<Floats>;
  { abs(a) } -> std::same_as<Floats>;
  { copysign(a, a) } -> std::same_as<Floats>;
  { times_power_of_two(a, i) } -> std::same_as<Floats>;
  { to_int(a) } -> std::same_as<Ints>;
  { to_float(i) } -> std::same_as<Floats>;
  { bits_of(a) } -> std::same_as<Ints>;
  { float_of(i) } -> std::same_as<Floats>;
  { at_least(a, a) } -> std::same_as<Ints>;
  { all_at_most(a, a) } -> std::same_as<bool>;
  { in_register(a) } -> std::same_as<Floats>;
};

template <class Ints, class Floats>
concept IntLanes = Arithmetic<Ints, int32_t> && requires(Ints a, Floats f) {
  { bit_and(a, a) } -> std::same_as<Ints>;
  { bit_or(a, a) } -> std::same_as<Ints>;
  { bit_xor(a, a) } -> std::same_as<Ints>;
  { shift_left<3>(a) } -> std::same_as<Ints>;
  { shift_right<3>(a) } -> std::same_as<Ints>;
  { shift_right_signed<3>(a) } -> std::same_as<Ints>;
  { shift_right(a, a) } -> std::same_as<Ints>;
  { all_bytes_have(a, 1) } -> std::same_as<bool>;
  { select(a, a, a) } -> std::same_as<Ints>;
  { max_u32(a, a) } -> std::same_as<Ints>;
  { mul_high_u16(a, a) } -> std::same_as<Ints>;
  { sub_saturating_u16(a, a) } -> std::same_as<Ints>;
  { count_down_above(a, f, f) } -> std::same_as<Ints>;
  { negate_where_negative(a, f) } -> std::same_as<Ints>;
};

// Pointers are to template parameters (Float, Half ..): a missing function then makes the concept false
// rather than ill-formed.
template <class Floats, class Ints, class Float = float, class Half = uint16_t, class Int = int32_t,
          class Byte = uint8_t, class Signed = int8_t>
concept LanesInMemory = requires(Floats a, Ints i, Float* f, Half* h, Int* n, Byte* b, Signed* s) {
  { load(f) } -> std::same_as<Floats>;
  { load_f16(h) } -> std::same_as<Floats>;
  { load_bf16(h) } -> std::same_as<Floats>;
  { load_i32(n) } -> std::same_as<Ints>;
  { load_u8(b) } -> std::same_as<Ints>;
  { lookup8(f, i) } -> std::same_as<Floats>;
  { lookup16(f, i) } -> std::same_as<Floats>;
  store(f, a);
  store_f16(h, a);
  store_bf16(h, a);
  store_i32(n, i);
  store_u8(b, i);
  store_i8(s, i);
  load_32_u8(b, a, a);
  load_32_u4(b, a, a);
  store_32_u8(b, i, i, 0);
  store_32_u4(b, i, i, 0);
  transpose_16x16(f, int64_t{}, f, int64_t{});
};

template <class Codes, class Floats, class Byte = uint8_t>
concept CodesOfWeights = requires(Codes c, Byte* b) {
  { load_codes(b) } -> std::same_as<Codes>;
  words_of(load_codes(b));
  { lookup16(b, c) } -> std::same_as<Codes>;
  { int8_value<0>(c) } -> std::same_as<Floats>;
  { int8_value<3>(c) } -> std::same_as<Floats>;
  { int4_value<0>(c) } -> std::same_as<Floats>;
  { int4_value<7>(c) } -> std::same_as<Floats>;
  { bf16_pair_value<0>(c) } -> std::same_as<Floats>;
  { bf16_pair_value<1>(c) } -> std::same_as<Floats>;
  { int4_shift(sizeof(Byte)) } -> std::same_as<int>;
};

// The functions with which attention over a cache reads keys and values.
template <class Pairs, class Ints, class Half = int16_t, class Byte = uint8_t, class Signed = int8_t>
concept PairLanes = requires(Pairs p, Ints i, Half* h, Byte* b, Signed* s) {
  { load_i16(h) } -> std::same_as<Pairs>;
  { load_pair(h) } -> std::same_as<Pairs>;
  store_i16(h, i);
  { zip_i8(s, s) } -> std::same_as<Pairs>;
  { zip_i4<false>(b, b) } -> std::same_as<Pairs>;
  { zip_i4<true>(b, b) } -> std::same_as<Pairs>;
  { add_pairs(i, p, p) } -> std::same_as<Ints>;
  { in_register(p) } -> std::same_as<Pairs>;
  { twice_i8(s) } -> std::same_as<Pairs>;
  { twice_i4(b).low } -> std::same_as<Pairs&&>;
  { twice_i4(b).high } -> std::same_as<Pairs&&>;
};
template <class Floats, class Eight, class Ints, class Float = float, class Half = uint16_t>
concept HalvesOfVectors = requires(Floats a, Ints i, Eight e, Float* f, Half* h) {
  { twice(f).a } -> std::same_as<Floats&&>;
  { twice_f16(h).b } -> std::same_as<Floats&&>;
  { twice_bf16(h).b } -> std::same_as<Floats&&>;
  { load_bf16_unordered(h) } -> std::same_as<Floats>;
  { ordered_bf16(a) } -> std::same_as<Floats>;
  { half_sums(a, a, a, a) } -> std::same_as<Eight>;
  { half_sums(i, i, i, i) } -> std::same_as<Eight>;
  { load8(f) } -> std::same_as<Eight>;
  { repeat_two(f) } -> std::same_as<Eight>;
  { repeat_four(f) } -> std::same_as<Eight>;
  { mul(e, e) } -> std::same_as<Eight>;
  store_two_rows(f, int64_t{}, e);
  store_four_rows(f, int64_t{}, e);
};

// Unsigned codes times signed activations, four k per step, exact.
template <class Dot, class Ints>
concept IntegerDot = requires(typename Dot::Codes c, typename Dot::Acc acc, const typename Dot::Step* a, Ints total) {
  { Dot::start(total) } -> std::same_as<typename Dot::Acc>;
  { Dot::step(acc, c, a) } -> std::same_as<typename Dot::Acc>;
  { Dot::finish(total, acc) } -> std::same_as<Ints>;
  requires Dot::kChains >= 1;
  requires Dot::kOffset >= 0;
};
template <class Dot, class Codes>
concept DotOfNibbles = requires(Codes c) {
  { Dot::low(c) } -> std::same_as<typename Dot::Codes>;
  { Dot::high(c) } -> std::same_as<typename Dot::Codes>;
  requires Dot::kInt16 >= 0;
};
template <class Dot, class Codes>
concept DotOfBytes = requires(Codes c) {
  { Dot::codes(c) } -> std::same_as<typename Dot::Codes>;
};

template <class Dot, class Ints, class Codes>
concept DotOfPlaces = requires(Ints sum, Codes c, Ints places, const typename Dot::Step* a) {
  { Dot::step(sum, c, places, a) } -> std::same_as<Ints>;
  { Dot::offset(sum, c) } -> std::same_as<Ints>;
  requires Dot::kOffset >= 0;
};

#define LOWBIT_MUST(...) static_assert(__VA_ARGS__, "the header of this instruction set (LOWBIT_ISA_HEADER) lacks " \
                                                    "the function named below; scalar.hpp says what it computes")
LOWBIT_MUST(FloatLanes<f32x16, i32x16>);
LOWBIT_MUST(IntLanes<i32x16, f32x16>);
LOWBIT_MUST(LanesInMemory<f32x16, i32x16>);
LOWBIT_MUST(CodesOfWeights<u8x64, f32x16>);
LOWBIT_MUST(PairLanes<i16x32, i32x16>);
LOWBIT_MUST(HalvesOfVectors<f32x16, f32x8, i32x16>);
LOWBIT_MUST(IntegerDot<Dot4, i32x16> && DotOfNibbles<Dot4, u8x64>);
LOWBIT_MUST(IntegerDot<Dot8, i32x16> && DotOfBytes<Dot8, u8x64>);
LOWBIT_MUST(DotOfPlaces<Dot8SemiSparse, i32x16, u8x64>);
#undef LOWBIT_MUST
static_assert(kDotRows >= 1 && kDotPanels >= 1 && kFloatRows >= 1 && kFloatPanels >= 1 && kStreamRows >= 1,
              "the tiles of linear must have rows and panels");

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
