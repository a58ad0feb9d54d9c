// SPDX-License-Identifier: Apache-2.0
// The list of weight formats. Numbers are stored in state dicts: append, never reorder.
#pragma once

#include <utility>

#include "formats/bfloat16.hpp"
#include "formats/float16.hpp"
#include "formats/float32.hpp"
#include "formats/fp4.hpp"
#include "formats/fp8_e4m3.hpp"
#include "formats/int4.hpp"
#include "formats/int8.hpp"
#include "formats/int8_semi_sparse.hpp"
#include "formats/intx.hpp"
#include "formats/nf4.hpp"

namespace lowbit {

#define LOWBIT_FORMATS(X)             \
  X(float32, Float32)                 \
  X(bfloat16, BFloat16)               \
  X(float16, Float16)                 \
  X(int8, Int8)                       \
  X(int4, Int4)                       \
  X(nf4, Nf4)                         \
  X(fp4, Fp4)                         \
  X(fp4_e2m1, Fp4E2M1)                \
  X(fp8_e4m3, Fp8E4M3)                \
  X(int2, IntX<2>)                    \
  X(int3, IntX<3>)                    \
  X(int5, IntX<5>)                    \
  X(int6, IntX<6>)                    \
  X(int7, IntX<7>)                    \
  X(int8_semi_sparse, Int8SemiSparse) \
  /* append here */

#define LOWBIT_FORMAT(name, Codec) name,
enum class Format : int { LOWBIT_FORMATS(LOWBIT_FORMAT) };
#undef LOWBIT_FORMAT

#define LOWBIT_FORMAT(name, Codec) #name,
inline constexpr std::string_view kFormatNames[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

template <Format> struct CodecOf;
#define LOWBIT_FORMAT(name, Codec)  \
  static_assert(is_codec<Codec>()); \
  template <> struct CodecOf<Format::name> { using type = Codec; };
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
template <Format kFormat> using codec_of = typename CodecOf<kFormat>::type;

// Calls body.operator()<Format>() for a format known at run time only.
template <class Body>
LOWBIT_ALWAYS_INLINE constexpr auto with_format(Format format, Body&& body) {
  switch (format) {
#define LOWBIT_FORMAT(name, Codec) \
  case Format::name: return body.template operator()<Format::name>();
    LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  }
  __builtin_unreachable();
}

// Facts about a format known at run time only. Switches, not a table: kernel files must not contain weak symbols.
#define LOWBIT_FACT(Type, function, fact)                                                                  \
  struct FactOf_##function {                                                                               \
    template <Format kFormat>                                                                              \
    LOWBIT_ALWAYS_INLINE constexpr Type operator()() const { return codec_of<kFormat>::fact; }             \
  };                                                                                                       \
  LOWBIT_ALWAYS_INLINE constexpr Type function(Format format) { return with_format(format, FactOf_##function{}); }
LOWBIT_FACT(int, bits, bits)
LOWBIT_FACT(int, stored_bits, stored_bits)
LOWBIT_FACT(int, significant_bits, significant_bits)
LOWBIT_FACT(CodecKind, kind_of, kind)
LOWBIT_FACT(int, symmetric_zero, zero)  // the zero point of a symmetric weight
LOWBIT_FACT(int, code_of_zero, code_of_zero)
LOWBIT_FACT(int, code_max, code_max)
LOWBIT_FACT(int, smallest_group, smallest_group)
LOWBIT_FACT(float, integer_unit, integer_unit)
#undef LOWBIT_FACT

LOWBIT_ALWAYS_INLINE constexpr bool is_float(Format format) {
  return kind_of(format) == CodecKind::floating;
}
// Formats with 4-bit codes of 16 levels.
LOWBIT_ALWAYS_INLINE constexpr bool is_table(Format format) {
  return kind_of(format) == CodecKind::lookup && bits(format) == 4;
}
LOWBIT_ALWAYS_INLINE constexpr bool is_semi_sparse(Format format) {
  return kind_of(format) == CodecKind::semi_sparse;
}
LOWBIT_ALWAYS_INLINE constexpr bool is_integer(Format format) {
  return kind_of(format) == CodecKind::integer || is_semi_sparse(format);
}

// Formats that int8 activations are multiplied by as integers: integers, and levels that are integers.
LOWBIT_ALWAYS_INLINE constexpr bool has_integer_values(Format format) { return integer_unit(format) != 0; }

// Integer formats differ in bits and zero point alone: if a call passes these as numbers, one kernel serves all.
LOWBIT_ALWAYS_INLINE constexpr Format integers_as_int8(Format format) {
  return is_integer(format) ? Format::int8 : format;
}

// The format in which kernels read the codes of this one; if it is another, they unpack them.
LOWBIT_ALWAYS_INLINE constexpr Format read_as(Format format) {
  const bool bytes_or_nibbles = stored_bits(format) == 8 || stored_bits(format) == 4;
  return is_integer(format) && !bytes_or_nibbles ? Format::int8 : format;
}

}  // namespace lowbit
