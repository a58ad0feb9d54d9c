// SPDX-License-Identifier: Apache-2.0
// Rows of the ops optim_step, encode_state and decode_state: turns calls into tables for the kernels of gpu/optim.
#include <algorithm>

#include "cuda/backend.hpp"
#include "cuda/sources.hpp"
#include "gpu/optim/rows.hpp"

namespace lowbit::cuda {
namespace {

// A step of the tensors with one pair of parameter and gradient dtypes: tables as large as a launch allows.
class Steps {
 public:
  Steps(const OptimStepArgs& args, const Workspace& constants) : args_(args) {
    table_.hyper = args.hyper, table_.grad_scale = args.grad_scale, table_.found_inf = args.found_inf;
    table_.seed = args.seed, table_.block_size = args.block_size;
    table_.stochastic_rounding = args.stochastic_rounding;
    table_.constants = constants.at(0);
  }

  void take(DType param, DType grad) {
    table_.count = 0, tasks_ = 0;
    for (std::size_t i = 0; i < args_.tensors.size(); i++) {
      const OptimTensor& tensor = args_.tensors[i];
      if (tensor.param_dtype != param || tensor.grad_dtype != grad) continue;
      if (table_.count == StepTable::kMaxTensors) launch(param, grad);
      const int place = table_.count++;
      table_.tensor[place] = tensor, table_.position[place] = static_cast<int32_t>(i);
      table_.first_task[place] = static_cast<int32_t>(tasks_);
      tasks_ += ceil_div(tensor.numel, kTaskElements);
    }
    if (table_.count) launch(param, grad);
  }

 private:
  void launch(DType param, DType grad) {
    const StepKind kind{.rule = args_.rule, .moments = args_.moments, .format = args_.format,
                        .block_size = has_codes(args_.format) ? args_.block_size : kFloatBlock, .param = param,
                        .grad = grad};
    const Program& kernels = program(args_.place, kind.key(), [&] { return step_source(kind); });
    kernels.launch(args_.place, "count_steps", 1, kStepThreads, &table_);
    if (tasks_) kernels.launch(args_.place, "optim_step", tasks_, kStepThreads, &table_);
    table_.count = 0, tasks_ = 0;
  }

  const OptimStepArgs& args_;
  StepTable table_;
  int64_t tasks_ = 0;  // number of CTAs for the table
};

struct OptimKernels {
  static void step(const OptimStepArgs& args) {
    const auto most = static_cast<int64_t>(std::min<std::size_t>(args.tensors.size(), StepTable::kMaxTensors));
    const Workspace constants("optim_step", args.place, most * kMaxConstantBytes);
    Steps steps(args, constants);
    constexpr DType kFloats[] = {DType::float32, DType::bfloat16, DType::float16};
    for (const DType param : kFloats)
      for (const DType grad : kFloats) steps.take(param, grad);
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
