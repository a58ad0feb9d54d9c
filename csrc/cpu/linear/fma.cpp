// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with float activations: one per weight format.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/semi_sparse_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return stays_float(args.x_format) ? "" : "activations are int8";
}

template <Format kFormat>
constexpr auto kRun = is_semi_sparse(kFormat) ? linear_semi_sparse_floats : linear_float<read_as(kFormat)>;

#define LOWBIT_FORMAT(name, Codec) {LOWBIT_ROW("linear_" #name), refuses<Format::name>, kRun<Format::name>},
constexpr Kernel<LinearArgs> kRows[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

}  // namespace

void linear_fma_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
