// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with float activations.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/fma.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return args.x_format == XFormat::floating ? "" : "activations are int8";
}

constexpr Kernel<LinearArgs> kRows[] = {
    {LOWBIT_ROW("linear_int4"), refuses<Format::int4>, linear_float<Format::int4>},
    {LOWBIT_ROW("linear_int8"), refuses<Format::int8>, linear_float<Format::int8>},
    {LOWBIT_ROW("linear_bfloat16"), refuses<Format::bfloat16>, linear_float<Format::bfloat16>},
    {LOWBIT_ROW("linear_float16"), refuses<Format::float16>, linear_float<Format::float16>},
    {LOWBIT_ROW("linear_float32"), refuses<Format::float32>, linear_float<Format::float32>},
};

}  // namespace

void linear_fma_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
