// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear by products of bfloat16 on vectors: activations of bfloat16, and weights that are exact in it.
// More parts would be more products, which FMAs of float32 make as fast.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (args.x_format != XFormat::floating || args.dtype != DType::bfloat16) return "activations are not bfloat16";
  if (args.m < kFewestRows) return "fewer than 16 rows: FMAs of float32 are as fast";
  return args.weight_spec.group_size && args.weight_spec.group_size < kHalfK ? "groups of less than 32" : "";
}

template <Format kFormat, const std::string_view& kName>
void add_row(Backend& backend) {
  if constexpr (parts_of(kFormat) == 1) {
    static constexpr Kernel<LinearArgs> row{kName, refuses<kFormat>, linear_by<PartedRows>};
    add_rows(backend, &row, 1);
  }
}

}  // namespace

void linear_bf16_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                  \
  static constexpr std::string_view name_of_##name = LOWBIT_ROW("linear_" #name); \
  add_row<Format::name, name_of_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
