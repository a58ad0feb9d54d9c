// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/amx_dot.hpp"
#include "cpu/linear/amx_fma.hpp"
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

#define LOWBIT_INTEGER(name) \
  {LOWBIT_ROW("linear_" #name "_int8"), refuses<Format::name, false>, linear_amx_dot<read_as(Format::name)>},
#define LOWBIT_FORMAT(name, Codec) \
  {LOWBIT_ROW("linear_" #name), refuses<Format::name, true>, linear_amx_fma},
constexpr Kernel<LinearArgs> kRows[] = {LOWBIT_INTEGER_FORMATS(LOWBIT_INTEGER) LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT
#undef LOWBIT_INTEGER

}  // namespace

void linear_amx_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
