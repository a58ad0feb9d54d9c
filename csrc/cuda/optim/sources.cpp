// SPDX-License-Identifier: Apache-2.0
#include "cuda/sources.hpp"

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

Source step_source(Rule rule, int moments, StateFormat format, int64_t block_size) {
  const auto name = kStateFormatNames[static_cast<int>(format)];
  const auto step = concat("step<lowbit::", type_of(rule), "::Step<", moments, ">, ", format_of(format), ", ",
                           has_codes(format) ? block_size : kFloatBlock, ">");
  return {concat("optim_step of ", kRuleNames[static_cast<int>(rule)], " with ", moments, " moments in ", name,
                 has_codes(format) ? concat(", blocks of ", block_size) : ""),
          concat("#include \"gpu/optim/step.cuh\"\n",
                 kernel_text("count_steps", "kStepThreads", "StepTable", "count_steps"),
                 kernel_text("optim_step", "kStepThreads", "StepTable", step))};
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
