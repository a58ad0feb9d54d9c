// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with bfloat16 products on vectors: for bfloat16 activations, and
// weights that are exact in bfloat16. With more parts there would be more products, at which float32 FMAs are as fast.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/tiled_floats.hpp"
#include "cpu/linear/tiled_rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

struct Bf16Products {
  template <Format kFormat> static constexpr bool serves = parts_of(kFormat) == 1;
  template <Format> using Rows = PartedRows;

  static std::string_view refuses(const WeightSpec& spec, XFormat x_format, DType x_dtype) {
    if (parts_of(spec.format) != 1) return "weights are not exact in bfloat16";
    if (x_format != XFormat::floating || x_dtype != DType::bfloat16) return "activations are not bfloat16";
    return refuses_groups(spec);
  }
  template <Format kFormat>
  static std::string_view refuses_rows(const WeightSpec&, XFormat, DType, int64_t rows) {
    return rows < kMinRows ? "fewer than 16 rows: FMAs of float32 are as fast" : "";
  }
  static const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
    const Family* family = &kFamily<PartedRows>;
    with_format(spec.format, [&]<Format kFormat>() {
      if constexpr (serves<kFormat>)
        if (rows < kMinRows) family = &kFamily<StreamRows<read_as(kFormat)>>;
    });
    return *family;
  }
};

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts"), refuses_experts<Bf16Products>, run_experts<Bf16Products>}};

}  // namespace

void linear_bf16_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                   \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name),     \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name); \
  add_format_rows<Bf16Products, Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
