// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with float activations: one per weight format.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/linear.hpp"
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
void run_linear(const LinearArgs& args) {
  if constexpr (is_semi_sparse(kFormat))
    if (args.m <= kStreamRows && are_finite(x_of(args), args.weight_spec, args.m)) return linear_by<SteppedRows>(args);
  if (args.m <= StreamRows<read_as(kFormat)>::kPass) return linear_by<StreamRows<read_as(kFormat)>>(args);
  linear_by<BlockedRows>(args);
}

#define LOWBIT_FORMAT(name, Codec) {LOWBIT_ROW("linear_" #name), refuses<Format::name>, run_linear<Format::name>},
constexpr Kernel<LinearArgs> kRows[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

}  // namespace

void linear_fma_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
