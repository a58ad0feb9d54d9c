// SPDX-License-Identifier: Apache-2.0
#include "cuda/optim/sources.hpp"

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

std::string kernel(std::string_view name, std::string_view args, std::string_view body) {
  return concat("LOWBIT_KERNEL(", name, ", lowbit::cuda::kStepThreads, lowbit::cuda::", args, ") {\n  lowbit::cuda::",
                body, "(args);\n}\n");
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
          concat("#include \"cuda/optim/step.cuh\"\n", kernel("count_steps", "StepTable", "count_steps"),
                 kernel("optim_step", "StepTable", step))};
}

Source convert_source(StateFormat format, bool is_signed, int64_t block_size) {
  const auto convert = concat("Convert<", format_of(format), ", ", is_signed ? "true" : "false", ", ", block_size, ">");
  return {concat("conversion of ", is_signed ? "signed " : "unsigned ", kStateFormatNames[static_cast<int>(format)],
                 ", blocks of ", block_size),
          concat("#include \"cuda/optim/convert.cuh\"\n", kernel("encode_state", "ConvertArgs", convert + "::encode"),
                 kernel("decode_state", "ConvertArgs", convert + "::decode"))};
}

std::vector<Source> common_sources() {
  std::vector<Source> all;
  const auto add = [&](Rule rule, int moments) {
    for (const StateFormat format : {StateFormat::float32, StateFormat::bfloat16, StateFormat::float8})
      all.push_back(step_source(rule, moments, format, 256));
    all.push_back(step_source(rule, moments, StateFormat::dynamic8, 256));
    all.push_back(step_source(rule, moments, StateFormat::dynamic4, 128));
  };
  add(Rule::adamw, 2), add(Rule::sgd, 1), add(Rule::lion, 1);
  for (const bool is_signed : {true, false}) {
    for (const StateFormat format : {StateFormat::dynamic8, StateFormat::float8})
      all.push_back(convert_source(format, is_signed, 256));
    all.push_back(convert_source(StateFormat::dynamic4, is_signed, 128));
  }
  return all;
}

}  // namespace lowbit::cuda
