// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts with int8 activations on the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled_codes.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

std::string_view refuses_any(const WeightSpec& spec, XFormat x_format) {
  if (stays_float(x_format)) return "activations stay float";
  return spec.group_size && spec.group_size < kHalfK ? "groups of less than 32" : "";
}

template <Format kFormat>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  const std::string_view reason = refuses_any(args.weight_spec, args.x_format);
  return reason.empty() && args.m < kMinRows ? "fewer than 16 rows: vector products are as fast" : reason;
}
template <Format kFormat>
std::string_view refuses_gather(const GatherLinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return refuses_any(args.weight_spec, args.x_format);
}

const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
  const Family* family = nullptr;
  with_format(spec.format, [&]<Format kFormat>() {
    if constexpr (has_integer_values(kFormat))
      family = rows < kMinRows ? &kFamily<CodeRows<read_as(kFormat)>> : &kFamily<TiledCodeRows<read_as(kFormat)>>;
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

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts_int8"), refuses_experts, run_experts}};

template <Format kFormat, const std::string_view& kLinear, const std::string_view& kGatherLinear>
void add_format_rows(Backend& backend) {
  if constexpr (has_integer_values(kFormat)) {
    static constexpr Kernel<LinearArgs> row{kLinear, refuses<kFormat>, linear_by<TiledCodeRows<read_as(kFormat)>>};
    static constexpr Kernel<GatherLinearArgs> gather_row{kGatherLinear, refuses_gather<kFormat>, run_gather_linear};
    add_rows(backend, &row, 1);
    add_rows(backend, &gather_row, 1);
  }
}

}  // namespace

void linear_tiled_codes_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                         \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name "_int8"),   \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name "_int8"); \
  add_format_rows<Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
