// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with float activations on the tile unit of amx.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Why tiles do not suit this number of rows, or "".
template <Format kFormat>
std::string_view refuses_rows(const WeightSpec& spec, XFormat x_format, DType dtype, int64_t rows) {
  if (rows < min_rows(spec, x_format, dtype)) return "few rows: vector products are as fast";
  const bool six_products = kFormat == Format::float32 && dtype == DType::float32;
  return six_products && rows < 64 ? "float32 by float32, fewer than 64 rows: FMAs are as fast" : "";
}

std::string_view refuses_any(const WeightSpec& spec, XFormat x_format) {
  if (!stays_float(x_format)) return "activations are int8";
  return spec.group_size && spec.group_size < kHalfK ? "groups of less than 32" : "";
}

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  const std::string_view reason = refuses_any(args.weight_spec, args.x_format);
  return reason.empty() ? refuses_rows<kFormat>(args.weight_spec, args.x_format, args.dtype, args.m) : reason;
}
template <Format kFormat>
std::string_view refuses_gather(const GatherLinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return refuses_any(args.weight_spec, args.x_format);
}

const Family& family_of(const WeightSpec& spec, XFormat x_format, DType x_dtype, int64_t rows) {
  const Family* family = &kFamily<BlockedRows>;
  with_format(spec.format, [&]<Format kFormat>() {
    using Few = StreamRows<read_as(kFormat)>;
    if (refuses_rows<kFormat>(spec, x_format, x_dtype, rows).empty()) family = &kFamily<PartedRows>;
    else if (rows <= Few::kPass) family = &kFamily<Few>;
  });
  return *family;
}

void run_gather_linear(const GatherLinearArgs& args) { gather_by(args, family_of); }

std::string_view refuses_experts(const ExpertsArgs& args) {
  for (const ExpertWeights* weights : {&args.gate_up, &args.down}) {
    const std::string_view reason = refuses_any(weights->spec, weights->x_format);
    if (!reason.empty()) return reason;
  }
  return "";
}
void run_experts(const ExpertsArgs& args) { experts_by(args, family_of); }

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts"), refuses_experts, run_experts}};

template <Format kFormat, const std::string_view& kLinear, const std::string_view& kGatherLinear>
void add_format_rows(Backend& backend) {
  static constexpr Kernel<LinearArgs> row{kLinear, refuses<kFormat>, linear_by<PartedRows>};
  static constexpr Kernel<GatherLinearArgs> gather_row{kGatherLinear, refuses_gather<kFormat>, run_gather_linear};
  add_rows(backend, &row, 1);
  add_rows(backend, &gather_row, 1);
}

}  // namespace

void linear_amx_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                   \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name),     \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name); \
  add_format_rows<Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
