// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with bfloat16 products on vectors: for bfloat16 activations, and
// weights that are exact in bfloat16. With more parts there would be more products, at which float32 FMAs are as fast.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses_any(const WeightSpec& spec, XFormat x_format, DType dtype) {
  if (x_format != XFormat::floating || dtype != DType::bfloat16) return "activations are not bfloat16";
  return spec.group_size && spec.group_size < kHalfK ? "groups of less than 32" : "";
}
template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  const std::string_view reason = refuses_any(args.weight_spec, args.x_format, args.dtype);
  return reason.empty() && args.m < kMinRows ? "fewer than 16 rows: FMAs of float32 are as fast" : reason;
}
template <Format kFormat>
std::string_view refuses_gather(const GatherLinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return refuses_any(args.weight_spec, args.x_format, args.x.dtype);
}

const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
  const Family* family = &kFamily<PartedRows>;
  with_format(spec.format, [&]<Format kFormat>() {
    if constexpr (parts_of(kFormat) == 1)
      if (rows < kMinRows) family = &kFamily<StreamRows<read_as(kFormat)>>;
  });
  return *family;
}

void run_gather_linear(const GatherLinearArgs& args) { gather_by(args, family_of); }

std::string_view refuses_experts(const ExpertsArgs& args) {
  for (const ExpertWeights* weights : {&args.gate_up, &args.down}) {
    if (parts_of(weights->spec.format) != 1) return "weights are not exact in bfloat16";
    const std::string_view reason = refuses_any(weights->spec, weights->x_format, args.x.dtype);
    if (!reason.empty()) return reason;
  }
  return "";
}
void run_experts(const ExpertsArgs& args) { experts_by(args, family_of); }

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts"), refuses_experts, run_experts}};

template <Format kFormat, const std::string_view& kLinear, const std::string_view& kGatherLinear>
void add_format_rows(Backend& backend) {
  if constexpr (parts_of(kFormat) == 1) {
    static constexpr Kernel<LinearArgs> row{kLinear, refuses<kFormat>, linear_by<PartedRows>};
    static constexpr Kernel<GatherLinearArgs> gather_row{kGatherLinear, refuses_gather<kFormat>, run_gather_linear};
    add_rows(backend, &row, 1);
    add_rows(backend, &gather_row, 1);
  }
}

}  // namespace

void linear_bf16_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                   \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name),     \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name); \
  add_format_rows<Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
