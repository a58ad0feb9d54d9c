// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/linear.hpp"
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
  if (kFloatX && args.m < fewest_rows(args.weight_spec, args.x_format, args.dtype)) return "few rows: vector products are as fast";
  if (args.weight_spec.group_size && args.weight_spec.group_size < kHalfK) return "groups of less than 32";
  const bool six_products = kFormat == Format::float32 && args.dtype == DType::float32;
  return kFloatX && six_products && args.m < 64 ? "float32 by float32, fewer than 64 rows: FMAs are as fast" : "";
}

template <Format kFormat, const std::string_view& kOfCodes, const std::string_view& kOfFloats>
void add_format_rows(Backend& backend) {
  if constexpr (is_integer(kFormat)) {
    static constexpr Kernel<LinearArgs> row{kOfCodes, refuses<kFormat, false>, linear_by<TiledCodeRows<read_as(kFormat)>>};
    add_rows(backend, &row, 1);
  }
  static constexpr Kernel<LinearArgs> row{kOfFloats, refuses<kFormat, true>, linear_by<PartedRows>};
  add_rows(backend, &row, 1);
}

}  // namespace

void linear_amx_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                      \
  static constexpr std::string_view codes_##name = LOWBIT_ROW("linear_" #name "_int8"); \
  static constexpr std::string_view floats_##name = LOWBIT_ROW("linear_" #name);        \
  add_format_rows<Format::name, codes_##name, floats_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
