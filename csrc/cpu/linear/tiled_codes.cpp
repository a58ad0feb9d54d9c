// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with int8 activations on the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/dot.hpp"
#include "cpu/linear/tiled_codes.hpp"
#include "cpu/linear/tiled_rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct TiledCodes {
  template <Format kFormat> static constexpr bool serves = has_integer_values(kFormat);
  template <Format kFormat> using Rows = TiledCodeRows<read_as(kFormat)>;

  static std::string_view refuses(const WeightSpec& spec, XFormat x_format, DType) {
    return stays_float(x_format) ? "activations stay float" : refuses_groups(spec);
  }
  template <Format kFormat>
  static std::string_view refuses_rows(const WeightSpec&, XFormat, DType, int64_t rows) {
    return rows < kMinRows ? "fewer than 16 rows: vector products are as fast" : "";
  }
  static const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
    const Family* family = nullptr;
    with_format(spec.format, [&]<Format kFormat>() {
      if constexpr (serves<kFormat>) family = rows < kMinRows ? &kFamily<CodeRows<read_as(kFormat)>> : &kFamily<Rows<kFormat>>;
    });
    return *family;
  }
};

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts_int8"), refuses_experts<TiledCodes>, run_experts<TiledCodes>}};

}  // namespace

void linear_tiled_codes_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                         \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name "_int8"),   \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name "_int8"); \
  add_format_rows<TiledCodes, Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
