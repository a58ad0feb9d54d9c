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

template <Format kFormat>
void add_row(Backend& backend, std::string_view name) {
  if constexpr (is_integer(kFormat)) {
    const Kernel<LinearArgs> row{name, refuses<kFormat>, linear_dot<read_as(kFormat)>};
    add_rows(backend, &row, 1);
  }
}

}  // namespace

void linear_dot_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec) add_row<Format::name>(backend, LOWBIT_ROW("linear_" #name "_int8"));
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
