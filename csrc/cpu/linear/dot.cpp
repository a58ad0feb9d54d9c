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

#define LOWBIT_FORMAT(name) \
  {LOWBIT_ROW("linear_" #name "_int8"), refuses<Format::name>, linear_dot<read_as(Format::name)>},
constexpr Kernel<LinearArgs> kRows[] = {LOWBIT_INTEGER_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

}  // namespace

void linear_dot_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
