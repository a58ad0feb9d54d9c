// SPDX-License-Identifier: Apache-2.0
// Rows of the ops linear, gather_linear and experts on the tile unit, for one kind of products, which has
//   serves<format>                                  whether there are rows for a format
//   refuses(spec, x_format, x_dtype)                why a product does not suit, or ""
//   refuses_rows<format>(spec, x_format, x_dtype, rows)  why a row of linear does not suit so few rows, or ""
//   Rows<format>                                    the family of a row of linear
//   family_of                                       the families of the other two ops (families.hpp)
#pragma once

#include "cpu/linear/experts.hpp"
#include "cpu/linear/gather.hpp"
#include "cpu/linear/linear.hpp"
#include "cpu/linear/tiled.hpp"
#include "cpu/rows.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

inline std::string_view refuses_groups(const WeightSpec& spec) {
  return spec.group_size && spec.group_size < kHalfK ? "groups of less than 32" : "";
}

template <class Kind, Format kFormat>
std::string_view refuses_linear(const LinearArgs& args) {
  const WeightSpec& spec = args.weight_spec;
  if (spec.format != kFormat) return "another weight format";
  const std::string_view reason = Kind::refuses(spec, args.x_format, args.dtype);
  return reason.empty() ? Kind::template refuses_rows<kFormat>(spec, args.x_format, args.dtype, args.m) : reason;
}
template <class Kind, Format kFormat>
std::string_view refuses_gather_linear(const GatherLinearArgs& args) {
  if (args.weight_spec.format != kFormat) return "another weight format";
  return Kind::refuses(args.weight_spec, args.x_format, args.x.dtype);
}
template <class Kind>
std::string_view refuses_experts(const ExpertsArgs& args) {
  for (const ExpertWeights* weights : {&args.gate_up, &args.down}) {
    const std::string_view reason = Kind::refuses(weights->spec, weights->x_format, args.x.dtype);
    if (!reason.empty()) return reason;
  }
  return "";
}

template <class Kind> void run_gather_linear(const GatherLinearArgs& args) { gather_by(args, Kind::family_of); }
template <class Kind> void run_experts(const ExpertsArgs& args) { experts_by(args, Kind::family_of); }

template <class Kind, Format kFormat, const std::string_view& kLinear, const std::string_view& kGatherLinear>
void add_format_rows(Backend& backend) {
  if constexpr (Kind::template serves<kFormat>) {
    static constexpr Kernel<LinearArgs> row{kLinear, refuses_linear<Kind, kFormat>,
                                            linear_by<typename Kind::template Rows<kFormat>>};
    static constexpr Kernel<GatherLinearArgs> gather_row{kGatherLinear, refuses_gather_linear<Kind, kFormat>,
                                                         run_gather_linear<Kind>};
    add_rows(backend, &row, 1);
    add_rows(backend, &gather_row, 1);
  }
}

}  // namespace
}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
