// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear and gather_linear with float activations, one per weight format, of experts, and of
// linear_cross_entropy.
#include LOWBIT_ISA_HEADER

#include "cpu/linear/cross_entropy.hpp"
#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/semi_sparse_floats.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

template <Format kFormat, class Args>
std::string_view refuses(const Args& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return stays_float(args.x_format) ? "" : "activations are int8";
}

template <Format kFormat>
void run_linear(const LinearArgs& args) {
  if constexpr (is_semi_sparse(kFormat))
    if (args.m <= kStreamRows && are_finite(x_of(args), args.weight_spec, args.m)) return linear_by<SteppedRows>(args);
  if (args.m <= StreamRows<read_as(kFormat)>::kPass) return linear_by<StreamRows<read_as(kFormat)>>(args);
  linear_by<BlockedRows>(args);
}

const Family& family_of(const WeightSpec& spec, XFormat, DType, int64_t rows) {
  const Family* family = &kFamily<BlockedRows>;
  with_format(spec.format, [&]<Format kFormat>() {
    using Few = StreamRows<read_as(kFormat)>;
    if (rows <= Few::kPass) family = &kFamily<Few>;
  });
  return *family;
}

void run_gather_linear(const GatherLinearArgs& args) { gather_by(args, family_of); }

std::string_view refuses_experts(const ExpertsArgs& args) {
  const bool floats = stays_float(args.gate_up.x_format) && stays_float(args.down.x_format);
  return floats ? "" : "activations of a product are int8";
}
void run_experts(const ExpertsArgs& args) { experts_by(args, family_of); }

std::string_view refuses_loss(const LinearCrossEntropyArgs& args) {
  return stays_float(args.x_format) ? "" : "activations are int8";
}
void run_loss(const LinearCrossEntropyArgs& args) { cross_entropy_by(args, family_of); }

constexpr Kernel<LinearCrossEntropyArgs> kLossTable[] = {
    {LOWBIT_ROW("linear_cross_entropy"), refuses_loss, run_loss}};
constexpr Kernel<ExpertsArgs> kExpertsRows[] = {{LOWBIT_ROW("experts"), refuses_experts, run_experts}};

#define LOWBIT_FORMAT(name, Codec) \
  {LOWBIT_ROW("linear_" #name), refuses<Format::name, LinearArgs>, run_linear<Format::name>},
constexpr Kernel<LinearArgs> kRows[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT
#define LOWBIT_FORMAT(name, Codec) \
  {LOWBIT_ROW("gather_linear_" #name), refuses<Format::name, GatherLinearArgs>, run_gather_linear},
constexpr Kernel<GatherLinearArgs> kGatherRows[] = {LOWBIT_FORMATS(LOWBIT_FORMAT)};
#undef LOWBIT_FORMAT

}  // namespace

void linear_fma_rows(Backend& backend) {
  add(backend, kRows), add(backend, kGatherRows), add(backend, kExpertsRows), add(backend, kLossTable);
}

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
