// SPDX-License-Identifier: Apache-2.0
// Rows of the ops optim_step, encode_state and decode_state: makes tables for the kernels of step.hpp.
#include <type_traits>
#include <vector>

#include "gpu/optim/rows.hpp"
#include "level_zero/backend.hpp"
#include "level_zero/optim/call.hpp"
#include "level_zero/runtime/copies.hpp"
#include "level_zero/runtime/program.hpp"

namespace lowbit::level_zero {
namespace {

using gpu::kStepThreads;
using gpu::kTaskElements;

// Inputs of the constants that the host computes, read from the device and written back.
struct Numbers {
  float grad_scale = 1, found_inf = 0;
  std::vector<float> step_counts;  // one per tensor
};

Numbers read_numbers(const OptimStepArgs& args) {
  Numbers numbers{.step_counts = std::vector<float>(args.tensors.size())};
  const Copies copies(args.place.device);
  if (args.grad_scale) copies.add(&numbers.grad_scale, args.grad_scale, sizeof(float));
  if (args.found_inf) copies.add(&numbers.found_inf, args.found_inf, sizeof(float));
  for (std::size_t i = 0; i < args.tensors.size(); i++)
    copies.add(&numbers.step_counts[i], args.tensors[i].step_count, sizeof(float));
  copies.finish();
  return numbers;
}

template <class Rule, int kCount>
void step_with(const OptimStepArgs& args, Numbers& numbers) {
  using Step = typename Rule::template Step<kCount>;
  const gpu::StepOptions options{args.hyper, args.grad_scale ? &numbers.grad_scale : nullptr, nullptr, args.seed,
                                  args.block_size, args.stochastic_rounding};
  const std::size_t count = args.tensors.size();
  static_assert(std::is_trivially_copyable_v<StepEntry<Step>>);
  std::vector<StepEntry<Step>> entries;
  entries.reserve(count);
  const Workspace workspace("optim_step", args.place, static_cast<int64_t>(count * sizeof entries[0]));
  const Copies copies(args.place.device);
  int64_t tasks = 0;
  for (std::size_t i = 0; i < count; i++) {
    const OptimTensor& tensor = args.tensors[i];
    float& step_count = numbers.step_counts[i] += 1;
    copies.add(tensor.step_count, &step_count, sizeof step_count);
    entries.push_back({tensor, tasks, {options, tensor, static_cast<int64_t>(i), step_count}});
    tasks += ceil_div(tensor.numel, kTaskElements);
  }
  copies.add(workspace.at(0), entries.data(), count * sizeof entries[0]);
  copies.finish();
  if (tasks == 0) return;
  const StepCall call{workspace.at(0), static_cast<int32_t>(count)};
  constexpr bool is_usual = Step::kMoments == kUsualMoments<Rule>;
  const StateFormat of_states = Step::kMoments ? args.format : StateFormat::float32;
  const std::string_view format = kStateFormatNames[static_cast<int>(of_states)];
  const std::string rule(kRuleNames[static_cast<int>(args.rule)]);
  const std::string kernel = is_usual ? rule : concat(rule, "_", Step::kMoments, "_", format);
  program(args.place, is_usual ? concat("optim_step_", format) : "optim_step_others")
      .launch(args.place, kernel.c_str(), tasks, kStepThreads, &call, sizeof call);
  wait(args.place.device);  // until then the table is in use
}

// With args.moments moments, at most kCount.
template <class Rule, int kCount>
void step_of(const OptimStepArgs& args, Numbers& numbers) {
  if constexpr (kCount > moments_of<Rule>(Hyper{}))
    if (args.moments < kCount) return step_of<Rule, kCount - 1>(args, numbers);
  step_with<Rule, kCount>(args, numbers);
}

struct OptimKernels {
  static void step(const OptimStepArgs& args) {
    Numbers numbers = read_numbers(args);
    if (numbers.found_inf != 0) return;
    with_rule(args.rule, [&]<class Rule>() { step_of<Rule, kMaxMomentsOf<Rule>>(args, numbers); });
  }

  static void convert(const auto& args, const std::string& op, const gpu::ConvertArgs& given) {
    const std::string kernel =
        concat(op, "_", kStateFormatNames[static_cast<int>(args.format)], "_", args.is_signed ? 1 : 0);
    program(args.place, "optim_states")
        .launch(args.place, kernel.c_str(), ceil_div(given.numel, int64_t{kEach} * kStepThreads), kStepThreads, &given,
                sizeof given);
  }

  static std::string_view refuses(const auto& args) {
    if (!has_codes(args.format) || args.block_size == block_of(args.format)) return "";
    return "blocks of another size than 256, or 128 of 4 bits";
  }
};

}  // namespace

void add_optim_rows(Backend& backend) { gpu::add_optim_rows<OptimKernels>(backend); }

}  // namespace lowbit::level_zero
