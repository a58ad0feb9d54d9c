// SPDX-License-Identifier: Apache-2.0
// The list of weight formats. Numbers are stored in state dicts: append, never reorder.
#pragma once

#include <utility>

#include "formats/bfloat16.hpp"
#include "formats/float16.hpp"
#include "formats/float32.hpp"
#include "formats/int4.hpp"
#include "formats/int8.hpp"

namespace lowbit {

#define LOWBIT_FORMATS(X) \
  X(float32, Float32)     \
  X(bfloat16, BFloat16)   \
  X(float16, Float16)     \
  X(int8, Int8)           \
  X(int4, Int4)

#define LOWBIT_FORMAT(name, Codec) name,
enum class Format : int { LOWBIT_FORMATS(LOWBIT_FORMAT) };
#undef LOWBIT_FORMAT

#define LOWBIT_FORMAT(name, Codec) #name,
inline constexpr std::string_view kFormatNames[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

template <Format> struct CodecOf;
#define LOWBIT_FORMAT(name, Codec) \
  template <> struct CodecOf<Format::name> { using type = Codec; };
LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
template <Format kFormat> using codec_of = typename CodecOf<kFormat>::type;

// body.operator()<Format>() for the format that is only known now.
template <class Body>
LOWBIT_INLINE constexpr auto with_format(Format format, Body&& body) {
  switch (format) {
#define LOWBIT_FORMAT(name, Codec) \
  case Format::name: return body.template operator()<Format::name>();
    LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  }
  __builtin_unreachable();
}

// What is asked of a format that is only known now. Switches, not a table: kernel files may leave no weak symbol.
#define LOWBIT_FORMAT(name, Codec) case Format::name: return Codec::LOWBIT_FACT;
#define LOWBIT_FACT bits
LOWBIT_INLINE constexpr int bits(Format format) {
  switch (format) { LOWBIT_FORMATS(LOWBIT_FORMAT) }
  __builtin_unreachable();
}
#undef LOWBIT_FACT
#define LOWBIT_FACT is_float
LOWBIT_INLINE constexpr bool is_float(Format format) {
  switch (format) { LOWBIT_FORMATS(LOWBIT_FORMAT) }
  __builtin_unreachable();
}
#undef LOWBIT_FACT
#define LOWBIT_FACT zero  // the unsigned code that decodes to zero in a symmetric format
LOWBIT_INLINE constexpr int symmetric_zero(Format format) {
  switch (format) { LOWBIT_FORMATS(LOWBIT_FORMAT) }
  __builtin_unreachable();
}
#undef LOWBIT_FACT
#define LOWBIT_FACT code_max
LOWBIT_INLINE constexpr int code_max(Format format) {
  switch (format) { LOWBIT_FORMATS(LOWBIT_FORMAT) }
  __builtin_unreachable();
}
#undef LOWBIT_FACT
#undef LOWBIT_FORMAT

}  // namespace lowbit
