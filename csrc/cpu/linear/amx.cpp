// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/tiled_codes.hpp"
#include "cpu/linear/tiled_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat, bool kFloatX>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (stays_float(args.x_format) != kFloatX) return kFloatX ? "activations are int8" : "activations stay float";
  if (!kFloatX && args.m < kFewestRows) return "fewer than 16 rows: vector products are as fast";
  if (kFloatX && args.m < fewest_rows(args)) return "few rows: vector products are as fast";
  if (args.weight_spec.group_size && args.weight_spec.group_size < kHalfK) return "groups of less than 32";
  const bool six_products = kFormat == Format::float32 && args.dtype == DType::float32;
  return kFloatX && six_products && args.m < 64 ? "float32 by float32, fewer than 64 rows: FMAs are as fast" : "";
}

template <Format kFormat>
void add_format_rows(Backend& backend, std::string_view of_codes, std::string_view of_floats) {
  if constexpr (is_integer(kFormat)) {
    const Kernel<LinearArgs> row{of_codes, refuses<kFormat, false>, linear_tiled_codes<read_as(kFormat)>};
    add_rows(backend, &row, 1);
  }
  const Kernel<LinearArgs> row{of_floats, refuses<kFormat, true>, linear_tiled_floats};
  add_rows(backend, &row, 1);
}

}  // namespace

void linear_amx_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec) \
  add_format_rows<Format::name>(backend, LOWBIT_ROW("linear_" #name "_int8"), LOWBIT_ROW("linear_" #name));
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
