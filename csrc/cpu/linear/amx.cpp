// SPDX-License-Identifier: Apache-2.0
// Rows of the op linear with int8 activations, by the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/amx.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// A tile takes its 16 cycles whatever rows of it are wanted.
constexpr int64_t kFewestRows = 16;

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  if (args.x_format == XFormat::floating) return "activations stay float";
  return args.m < kFewestRows ? "fewer than 16 rows: vector products are as fast" : "";
}

constexpr Kernel<LinearArgs> kRows[] = {
    {LOWBIT_ROW("linear_int4_int8"), refuses<Format::int4>, linear_amx<Format::int4>},
    {LOWBIT_ROW("linear_int8_int8"), refuses<Format::int8>, linear_amx<Format::int8>},
};

}  // namespace

void linear_amx_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
