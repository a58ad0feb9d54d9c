// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with int8 activations.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/dot.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return stays_float(args.x_format) ? "activations stay float" : "";
}

constexpr Kernel<LinearArgs> kRows[] = {
    {LOWBIT_ROW("linear_int4_int8"), refuses<Format::int4>, linear_dot<Format::int4>},
    {LOWBIT_ROW("linear_int8_int8"), refuses<Format::int8>, linear_dot<Format::int8>},
};

}  // namespace

void linear_dot_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
