// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear, experts and linear_cross_entropy with int8 activations.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/cross_entropy.hpp"
#include "cpu/linear/dot.hpp"
#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/semi_sparse.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat, class Args>
std::string_view refuses(const Args& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return stays_float(args.x_format) ? "activations stay float" : "";
}

template <Format kFormat>
void run_linear(const LinearArgs& args) {
  if constexpr (is_semi_sparse(kFormat))
    if (args.m < kExpandRows) return linear_by<SemiSparseRows>(args);
  linear_by<CodeRows<read_as(kFormat)>>(args);  // panels of a 2:4 weight are expanded to int8, once for all rows
}

const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
  const Family* family = nullptr;
  with_format(spec.format, [&]<Format kFormat>() {
    if constexpr (has_integer_values(kFormat)) family = &kFamily<CodeRows<read_as(kFormat)>>;
    if constexpr (is_semi_sparse(kFormat))
      if (rows < kExpandRows) family = &kFamily<SemiSparseRows>;
  });
  return *family;
}

void run_gather_linear(const GatherLinearArgs& args) { gather_by(args, family_of); }

std::string_view refuses_experts(const ExpertsArgs& args) {
  const bool floats = stays_float(args.gate_up.x_format) || stays_float(args.down.x_format);
  return floats ? "activations of a product stay float" : "";
}
void run_experts(const ExpertsArgs& args) { experts_by(args, family_of); }

std::string_view refuses_loss(const LinearCrossEntropyArgs& args) {
  return stays_float(args.x_format) ? "activations stay float" : "";
}
void run_loss(const LinearCrossEntropyArgs& args) { cross_entropy_by(args, family_of); }

constexpr Kernel<LinearCrossEntropyArgs> kLossTable[] = {
    {LOWBIT_ROW("linear_cross_entropy_int8"), refuses_loss, run_loss}};
constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts_int8"), refuses_experts, run_experts}};

template <Format kFormat, const std::string_view& kLinear, const std::string_view& kGatherLinear>
void add_format_rows(Backend& backend) {
  if constexpr (has_integer_values(kFormat)) {
    static constexpr Kernel<LinearArgs> row{kLinear, refuses<kFormat, LinearArgs>, run_linear<kFormat>};
    static constexpr Kernel<GatherLinearArgs> gather_row{kGatherLinear, refuses<kFormat, GatherLinearArgs>,
                                                         run_gather_linear};
    add_rows(backend, &row, 1);
    add_rows(backend, &gather_row, 1);
  }
}

}  // namespace

void linear_dot_rows(Backend& backend) {
#define LOWBIT_FORMAT(name, Codec)                                                         \
  static constexpr std::string_view linear_##name = LOWBIT_ROW("linear_" #name "_int8"),   \
                                    gather_##name = LOWBIT_ROW("gather_linear_" #name "_int8"); \
  add_format_rows<Format::name, linear_##name, gather_##name>(backend);
  LOWBIT_FORMATS(LOWBIT_FORMAT)
#undef LOWBIT_FORMAT
  add(backend, kExpertsRows), add(backend, kLossTable);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
