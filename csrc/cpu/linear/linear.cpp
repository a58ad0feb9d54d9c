// SPDX-License-Identifier: Apache-2.0
// The rows of the op linear, compiled once per instruction set. dot.hpp: int8 activations; fma.hpp: float activations.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/fma.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat, bool kInt8Activations>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if ((args.x_format != XFormat::floating) != kInt8Activations) return kInt8Activations ? "activations stay float" : "activations are int8";
  return "";
}

#define LOWBIT_STRING_OF(name) #name
#define LOWBIT_STRING(name) LOWBIT_STRING_OF(name)
#define LOWBIT_ROW(what) "linear_" what "_" LOWBIT_STRING(LOWBIT_ISA_NAME)

constexpr Kernel<LinearArgs> kRows[] = {
    {LOWBIT_ROW("int4_int8"), refuses<Format::int4, true>, linear_dot<Format::int4>},
    {LOWBIT_ROW("int8_int8"), refuses<Format::int8, true>, linear_dot<Format::int8>},
#ifndef LOWBIT_HAS_VNNI  // VNNI adds integer products only: the rows below would be those of avx512
    {LOWBIT_ROW("int4"), refuses<Format::int4, false>, linear_float<Format::int4>},
    {LOWBIT_ROW("int8"), refuses<Format::int8, false>, linear_float<Format::int8>},
    {LOWBIT_ROW("bfloat16"), refuses<Format::bfloat16, false>, linear_float<Format::bfloat16>},
    {LOWBIT_ROW("float16"), refuses<Format::float16, false>, linear_float<Format::float16>},
    {LOWBIT_ROW("float32"), refuses<Format::float32, false>, linear_float<Format::float32>},
#endif
};

}  // namespace

std::span<const Kernel<LinearArgs>> linear_rows() { return kRows; }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
