// SPDX-License-Identifier: Apache-2.0
#include "cuda/experts/sources.hpp"

namespace lowbit::cuda {
namespace {

std::string kernel_of_experts(std::string_view name, std::string_view body) {
  return early_kernel_text(name, "kLinearThreads", "ExpertsCall", body);
}

}  // namespace

Source pairs_source() {
  return {"pairs of experts", concat("#include \"cuda/experts/pairs.cuh\"\n", kernel_of_experts("sort_pairs", "sort_pairs"),
                                     kernel_of_experts("gather_rows", "gather_rows"))};
}

Source experts_source(const LinearKind& kind) {
  return {concat("products of experts, ", linear_source(kind).name),
          concat("#include \"cuda/experts/product.cuh\"\n",
                 kernel_text("product_of_experts", "kLinearThreads", "ExpertsCall",
                             concat("product_of_experts<", arguments_of(kind), ">")))};
}

Source ends_source(const LinearKind& kind) {
  const bool codes = kind.x_parts == 0, scaled = kind.tile_groups > 0;
  const std::string format(kFormatNames[static_cast<int>(kind.format)]),
      arguments = concat("<lowbit::Format::", format, ", ", codes ? "true" : "false", ", ", scaled ? 1 : 0, ">");
  return {concat("results of experts of ", format,
                 codes ? concat(", int8 activations, ", scaled ? "scaled" : "whole", " sums") : ""),
          concat("#include \"cuda/experts/ends.cuh\"\n", kernel_of_experts("gate_experts", "gate_experts" + arguments),
                 kernel_of_experts("add_experts", "add_experts" + arguments))};
}

void add_experts_sources(std::vector<Source>& all, LinearKind kind) {
  add_once(all, pairs_source()), add_once(all, ends_source(kind));
  for (; kind.rows <= kind.max_rows(); kind.rows = kind.rows == 1 ? kRowsAtOnce : 2 * kind.rows)
    all.push_back(experts_source(kind));
}

}  // namespace lowbit::cuda
