// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with int8 activations.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/linear.hpp"
#include "cpu/linear/semi_sparse.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return stays_float(args.x_format) ? "activations stay float" : "";
}

template <Format kFormat>
void run_linear(const LinearArgs& args) {
  if constexpr (is_semi_sparse(kFormat))
    if (args.m < kExpandRows) return linear_by<SemiSparseRows>(args);
  linear_by<CodeRows<read_as(kFormat)>>(args);  // panels of a 2:4 weight are expanded to int8, once for all rows
}

template <Format kFormat, const std::string_view& kName>
void add_row(Backend& backend) {
  if constexpr (is_integer(kFormat)) {
    static constexpr Kernel<LinearArgs> row{kName, refuses<kFormat>, run_linear<kFormat>};
    add_rows(backend, &row, 1);
  }
}

}  // namespace

void linear_dot_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                  \
  static constexpr std::string_view name_of_##name = LOWBIT_ROW("linear_" #name "_int8"); \
  add_row<Format::name, name_of_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
