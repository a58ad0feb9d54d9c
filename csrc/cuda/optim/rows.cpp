// SPDX-License-Identifier: Apache-2.0
// Rows of the ops optim_step, encode_state and decode_state: calls as tables for the kernels of the
// headers beside this.
#include "cuda/backend.hpp"
#include "cuda/sources.hpp"
#include "gpu/optim/rows.hpp"

namespace lowbit::cuda {
namespace {

// As many tensors as a launch takes, from `first` on; returns how many CTAs the step has.
int64_t fill(StepTable& table, const OptimStepArgs& args, std::size_t first) {
  const std::size_t left = args.tensors.size() - first;
  table.count = static_cast<int>(left < StepTable::kMostTensors ? left : StepTable::kMostTensors);
  table.first_tensor = static_cast<int64_t>(first);
  int64_t tasks = 0;
  for (int i = 0; i < table.count; i++) {
    table.tensor[i] = args.tensors[first + static_cast<std::size_t>(i)];
    table.first_task[i] = static_cast<int32_t>(tasks);
    tasks += ceil_div(table.tensor[i].numel, kTaskElements);
  }
  return tasks;
}

struct OptimKernels {
  static void step(const OptimStepArgs& args) {
    const SourceKey key{static_cast<int64_t>(SourceKind::step), static_cast<int64_t>(args.rule), args.moments,
                        static_cast<int64_t>(args.format), has_codes(args.format) ? args.block_size : 0};
    const Program& kernels = program(args.place, key, [&] {
      return step_source(args.rule, args.moments, args.format, args.block_size);
    });
    StepTable table;
    table.hyper = args.hyper, table.grad_scale = args.grad_scale, table.found_inf = args.found_inf;
    table.seed = args.seed, table.block_size = args.block_size, table.stochastic_rounding = args.stochastic_rounding;
    for (std::size_t first = 0; first < args.tensors.size(); first += StepTable::kMostTensors) {
      const int64_t tasks = fill(table, args, first);
      kernels.launch(args.place, "count_steps", 1, kStepThreads, &table);
      if (tasks) kernels.launch(args.place, "optim_step", tasks, kStepThreads, &table);
    }
  }

  static void convert(const auto& args, const std::string& op, const ConvertArgs& given) {
    const SourceKey key{static_cast<int64_t>(SourceKind::convert), static_cast<int64_t>(args.format), args.is_signed,
                        args.block_size};
    const Program& kernels = program(args.place, key, [&] {
      return convert_source(args.format, args.is_signed, args.block_size);
    });
    const int64_t ctas = ceil_div(given.numel, int64_t{elements_each(args.block_size)} * kStepThreads);
    kernels.launch(args.place, op.c_str(), ctas, kStepThreads, &given);
  }

  static std::string_view refuses(const auto&) { return ""; }
};

}  // namespace

void add_optim_rows(Backend& backend) { gpu::add_optim_rows<OptimKernels>(backend); }

}  // namespace lowbit::cuda
