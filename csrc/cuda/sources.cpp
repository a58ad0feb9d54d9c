// SPDX-License-Identifier: Apache-2.0
#include "cuda/sources.hpp"

#include <algorithm>

#include "cuda/experts/sources.hpp"

namespace lowbit::cuda {

std::string kernel_text(std::string_view name, std::string_view threads, std::string_view Args,
                        std::string_view body) {
  return concat("LOWBIT_KERNEL(", name, ", lowbit::cuda::", threads, ", lowbit::cuda::", Args, ") {\n  lowbit::cuda::",
                body, "(args);\n}\n");
}

std::string early_kernel_text(std::string_view name, std::string_view threads, std::string_view Args,
                              std::string_view body) {
  return concat("#include \"cuda/device/early.cuh\"\n",
                kernel_text(name, threads, Args, concat("begin_early();\n  lowbit::cuda::", body)));
}

void add_once(std::vector<Source>& all, Source source) {
  if (std::none_of(all.begin(), all.end(), [&](const Source& other) { return other.name == source.name; }))
    all.push_back(std::move(source));
}

std::vector<Source> common_sources(const std::string& architecture) {
  std::vector<Source> all;
  const auto add_rule = [&](Rule rule, int moments) {
    for (int format = 0; format < static_cast<int>(std::size(kStateFormatNames)); format++)
      for (const DType dtype : {DType::float32, DType::bfloat16}) {
        const auto state = static_cast<StateFormat>(format);
        all.push_back(step_source({.rule = rule, .moments = moments, .format = state,
                                   .block_size = state == StateFormat::dynamic4 ? 128 : 256, .param = dtype,
                                   .grad = dtype}));
      }
  };
  add_rule(Rule::adamw, 2), add_rule(Rule::sgd, 1), add_rule(Rule::lion, 1);
  for (const bool is_signed : {true, false}) {
    for (const StateFormat format : {StateFormat::dynamic8, StateFormat::float8})
      all.push_back(convert_source(format, is_signed, 256));
    all.push_back(convert_source(StateFormat::dynamic4, is_signed, 128));
  }
  // bfloat16 activations, and codes: one row, and many
  const auto add_linear = [&](Format format, int x_parts, int tile_groups) {
    LinearKind kind{format, x_parts, tile_groups, false, 8, x_parts == 1 && can_be_in_place(format)};
    add_once(all, activations_source(kind)), add_once(all, splits_source(kind));
    if (kind.in_place) kind.rows = 1, all.push_back(linear_source(kind)), kind.rows = 8;
    for (; kind.rows <= kind.max_rows(); kind.rows *= 2) all.push_back(linear_source(kind));
    if (!x_parts) kind.rows = 64, all.push_back(code_tiles_source(kind));
    if (!x_parts && !tile_groups) all.push_back(decoded_source(format, true));
    if (x_parts) all.push_back(dequantize_source(format)), all.push_back(decoded_source(format, false));
    if (architecture == kHopper && (format == Format::int4 || !x_parts))
      add_wgmma_sources(all, kind);
  };
  add_linear(Format::int4, 1, 1), add_linear(Format::int8, 1, 0), add_linear(Format::nf4, 1, 1);
  add_linear(Format::fp8_e4m3, 1, 0), add_linear(Format::int8, 0, 0), add_linear(Format::int4, 0, 2);
  add_experts_sources(all, {Format::int4, 1, 1, false, 1, true}), add_experts_sources(all, {Format::int4, 0, 2, false, 8});
  for (const Format format : {Format::int8, Format::nf4, Format::fp8_e4m3}) all.push_back(pack_source(format, false));
  all.push_back(pack_source(Format::int8, true)), all.push_back(all_finite_source());
  all.push_back(hidden_rows_source());
  add_attention_sources(all, architecture), add_decode_sources(all);
  return all;
}

}  // namespace lowbit::cuda
