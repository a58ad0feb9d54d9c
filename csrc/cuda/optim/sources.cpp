// SPDX-License-Identifier: Apache-2.0
#include "cuda/sources.hpp"
#include "gpu/optim/table.hpp"

namespace lowbit::cuda {
namespace {

std::string_view type_of(Rule rule) {
  switch (rule) {
#define LOWBIT_RULE(name, Type) \
  case Rule::name: return #Type;
    LOWBIT_RULES(LOWBIT_RULE)
#undef LOWBIT_RULE
  }
  return "";
}

std::string format_of(StateFormat format) {
  return concat("lowbit::StateFormat::", kStateFormatNames[static_cast<int>(format)]);
}

}  // namespace

SourceKey StepKind::key() const {
  return {static_cast<int64_t>(SourceKind::step), static_cast<int64_t>(rule) << 8 | moments,
          static_cast<int64_t>(format), block_size, static_cast<int64_t>(param) << 8 | static_cast<int64_t>(grad)};
}

Source step_source(const StepKind& kind) {
  const auto rule = concat("lowbit::", type_of(kind.rule), "::Step<", kind.moments, ">");
  // 128 registers, or 80, with which large kernels spill, as do those of float32 that load a chunk ahead. AdamW8bit of
  // 134 M float32 parameters on an H200: 740 us with 3 CTAs and nothing ahead, 800 with 2 and a chunk ahead; bfloat16:
  // 670 with 3 and nothing ahead, 600 with a chunk ahead. Float states are bound by memory: a chunk ahead.
  const bool large =
      kind.moments > 2 || gpu::elements_each(kind.block_size) > 8 || kind.format == StateFormat::float8;
  const bool wide = kind.param == DType::float32 || kind.grad == DType::float32;
  const int ctas = large || kind.format == StateFormat::float32 || (wide && !has_codes(kind.format)) ? 2 : 3;
  const auto step = concat("step<", rule, ", ", format_of(kind.format), ", ", kind.block_size, ", lowbit::DType::",
                           name_of(kind.param), ", lowbit::DType::", name_of(kind.grad), ", ",
                           wide && ctas == 3 ? "false" : "true", ">");
  return {concat("optim_step of ", kRuleNames[static_cast<int>(kind.rule)], " with ", kind.moments, " moments in ",
                 kStateFormatNames[static_cast<int>(kind.format)],
                 has_codes(kind.format) ? concat(", blocks of ", kind.block_size) : "", ", parameters in ",
                 name_of(kind.param), ", gradients in ", name_of(kind.grad)),
          concat("#include \"gpu/optim/step.cuh\"\n",
                 kernel_text("count_steps", "kStepThreads", "StepTable", concat("count_steps<", rule, ">")),
                 kernel_text("optim_step", "kStepThreads", concat("StepTableOf<", ctas, ">"), step))};
}

Source convert_source(StateFormat format, bool is_signed, int64_t block_size) {
  const auto convert = concat("Convert<", format_of(format), ", ", is_signed ? "true" : "false", ", ", block_size, ">");
  return {concat("conversion of ", is_signed ? "signed " : "unsigned ", kStateFormatNames[static_cast<int>(format)],
                 ", blocks of ", block_size),
          concat("#include \"gpu/optim/convert.cuh\"\n",
                 kernel_text("encode_state", "kStepThreads", "ConvertArgs", convert + "::encode"),
                 kernel_text("decode_state", "kStepThreads", "ConvertArgs", convert + "::decode"))};
}

}  // namespace lowbit::cuda
