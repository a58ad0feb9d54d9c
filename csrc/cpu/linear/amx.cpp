// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts on the tile unit.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled_codes.hpp"
#include "cpu/linear/tiled_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Why tiles do not suit this number of rows, or "".
template <Format kFormat, bool kFloatX>
std::string_view refuses_rows(const WeightSpec& spec, XFormat x_format, DType dtype, int64_t rows) {
  if (!kFloatX && rows < kMinRows) return "fewer than 16 rows: vector products are as fast";
  if (kFloatX && rows < min_rows(spec, x_format, dtype)) return "few rows: vector products are as fast";
  const bool six_products = kFormat == Format::float32 && dtype == DType::float32;
  return kFloatX && six_products && rows < 64 ? "float32 by float32, fewer than 64 rows: FMAs are as fast" : "";
}

template <bool kFloatX>
std::string_view refuses_any(const WeightSpec& spec, XFormat x_format) {
  if (stays_float(x_format) != kFloatX) return kFloatX ? "activations are int8" : "activations stay float";
  return spec.group_size && spec.group_size < kHalfK ? "groups of less than 32" : "";
}

template <Format kFormat, bool kFloatX>
std::string_view refuses(const LinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  const std::string_view reason = refuses_any<kFloatX>(args.weight_spec, args.x_format);
  return reason.empty() ? refuses_rows<kFormat, kFloatX>(args.weight_spec, args.x_format, args.dtype, args.m) : reason;
}
template <Format kFormat, bool kFloatX>
std::string_view refuses_gather(const GatherLinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return refuses_any<kFloatX>(args.weight_spec, args.x_format);
}

const Family& family_of_codes(const WeightSpec& spec, XFormat, DType, int64_t rows) {
  const Family* family = nullptr;
  with_format(spec.format, [&]<Format kFormat>() {
    if constexpr (has_integer_values(kFormat))
      family = rows < kMinRows ? &kFamily<CodeRows<read_as(kFormat)>> : &kFamily<TiledCodeRows<read_as(kFormat)>>;
  });
  return *family;
}
const Family& family_of_floats(const WeightSpec& spec, XFormat x_format, DType x_dtype, int64_t rows) {
  const Family* family = &kFamily<BlockedRows>;
  with_format(spec.format, [&]<Format kFormat>() {
    using Few = StreamRows<read_as(kFormat)>;
    if (refuses_rows<kFormat, true>(spec, x_format, x_dtype, rows).empty()) family = &kFamily<PartedRows>;
    else if (rows <= Few::kPass) family = &kFamily<Few>;
  });
  return *family;
}

void run_gather_codes(const GatherLinearArgs& args) { gather_by(args, family_of_codes); }
void run_gather_floats(const GatherLinearArgs& args) { gather_by(args, family_of_floats); }

template <bool kFloatX>
std::string_view refuses_experts(const ExpertsArgs& args) {
  for (const ExpertWeights* weights : {&args.gate_up, &args.down}) {
    const std::string_view reason = refuses_any<kFloatX>(weights->spec, weights->x_format);
    if (!reason.empty()) return reason;
  }
  return "";
}
void run_experts_codes(const ExpertsArgs& args) { experts_by(args, family_of_codes); }
void run_experts_floats(const ExpertsArgs& args) { experts_by(args, family_of_floats); }

constexpr Kernel<ExpertsArgs> kExpertsRows[] = {
    {LOWBIT_ROW("experts_int8"), refuses_experts<false>, run_experts_codes},
    {LOWBIT_ROW("experts"), refuses_experts<true>, run_experts_floats}};

template <Format kFormat, const std::string_view& kOfCodes, const std::string_view& kOfFloats,
          const std::string_view& kGatherCodes, const std::string_view& kGatherFloats>
void add_format_rows(Backend& backend) {
  if constexpr (has_integer_values(kFormat)) {
    constexpr Format kRead = read_as(kFormat);
    static constexpr Kernel<LinearArgs> row{kOfCodes, refuses<kFormat, false>, linear_by<TiledCodeRows<kRead>>};
    static constexpr Kernel<GatherLinearArgs> gather_row{kGatherCodes, refuses_gather<kFormat, false>,
                                                         run_gather_codes};
    add_rows(backend, &row, 1);
    add_rows(backend, &gather_row, 1);
  }
  static constexpr Kernel<LinearArgs> row{kOfFloats, refuses<kFormat, true>, linear_by<PartedRows>};
  static constexpr Kernel<GatherLinearArgs> gather_row{kGatherFloats, refuses_gather<kFormat, true>,
                                                       run_gather_floats};
  add_rows(backend, &row, 1);
  add_rows(backend, &gather_row, 1);
}

}  // namespace

void linear_amx_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                                       \
  static constexpr std::string_view codes_##name = LOWBIT_ROW("linear_" #name "_int8"),                  \
                                    floats_##name = LOWBIT_ROW("linear_" #name),                         \
                                    gather_codes_##name = LOWBIT_ROW("gather_linear_" #name "_int8"),    \
                                    gather_floats_##name = LOWBIT_ROW("gather_linear_" #name);           \
  add_format_rows<Format::name, codes_##name, floats_##name, gather_codes_##name, gather_floats_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
