// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with float activations on the tile unit of amx.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/tiled_floats.hpp"
#include "cpu/linear/tiled_rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct TiledFloats {
  template <Format> static constexpr bool serves = true;
  template <Format> using Rows = PartedRows;

  static std::string_view refuses(const WeightSpec& spec, XFormat x_format, DType) {
    return stays_float(x_format) ? refuses_groups(spec) : "activations are int8";
  }
  template <Format kFormat>
  static std::string_view refuses_rows(const WeightSpec& spec, XFormat x_format, DType dtype, int64_t rows) {
    if (rows < min_rows(spec, x_format, dtype)) return "few rows: vector products are as fast";
    const bool six_products = kFormat == Format::float32 && dtype == DType::float32;
    return six_products && rows < 64 ? "float32 by float32, fewer than 64 rows: FMAs are as fast" : "";
  }
  static const Family& family_of(const WeightSpec& spec, XFormat x_format, DType x_dtype, int64_t rows) {
    const Family* family = &kFamily<BlockedRows>;
    with_format(spec.format, [&]<Format kFormat>() {
      using Few = StreamRows<read_as(kFormat)>;
      if (refuses_rows<kFormat>(spec, x_format, x_dtype, rows).empty()) family = &kFamily<PartedRows>;
      else if (rows <= Few::kPass) family = &kFamily<Few>;
    });
    return *family;
  }
};

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts"), refuses_experts<TiledFloats>, run_experts<TiledFloats>}};

}  // namespace

void linear_amx_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                   \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name),     \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name); \
  add_format_rows<TiledFloats, Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
