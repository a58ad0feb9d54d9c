// SPDX-License-Identifier: Apache-2.0
// Rows of the op optim_step: one per state format, each with all rules.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/optim/step.hpp"
#include "cpu/rows.hpp"
#include "rules/list.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Elements per task: enough to amortize scheduling (2 us at 8 GB/s per core, Zen 5), few enough to balance the load.
constexpr int64_t kTaskElements = 1 << 14;
static_assert(kTaskElements >= kMaxStateBlock);

constexpr DType known_here(DType dtype) { return kSpecializes ? dtype : DType::other; }

LOWBIT_INLINE int64_t tasks_of(const OptimTensor& tensor) { return (tensor.numel + kTaskElements - 1) / kTaskElements; }

// One parallel region for all tensors, with their tasks numbered consecutively: a task belongs to the last tensor whose
// first task does not come after it.
template <StateFormat kFormat, class Rule>
void step_all(const OptimStepArgs& args) {
  const int64_t count = static_cast<int64_t>(args.tensors.size());
  const Scratch memory((count + 1) * static_cast<int64_t>(sizeof(int64_t)));
  auto* const first_task = memory.as<int64_t>();
  first_task[0] = 0;
  for (int64_t i = 0; i < count; i++) first_task[i + 1] = first_task[i] + tasks_of(args.tensors[i]);
  const int64_t tasks = first_task[count];
  parallel_for(tasks, threads_worth(32 * kTaskElements * tasks), [&](int64_t task) {
    int64_t found = 0, end = count;
    while (end - found > 1) {
      const int64_t middle = (found + end) / 2;
      (first_task[middle] <= task ? found : end) = middle;
    }
    const OptimTensor& tensor = args.tensors[found];
    const int64_t first = (task - first_task[found]) * (kTaskElements / args.block_size),
                  blocks = (tensor.numel + args.block_size - 1) / args.block_size;
    const int64_t last = first + kTaskElements / args.block_size, stop = last < blocks ? last : blocks;
    const DType dtype = tensor.param_dtype == tensor.grad_dtype ? tensor.param_dtype : DType::other;
    if (kSpecializes && dtype == DType::float32)
      step_blocks<kFormat, Rule, known_here(DType::float32), known_here(DType::float32)>(args, tensor, first, stop);
    else if (kSpecializes && dtype == DType::bfloat16)
      step_blocks<kFormat, Rule, known_here(DType::bfloat16), known_here(DType::bfloat16)>(args, tensor, first, stop);
    else step_blocks<kFormat, Rule, DType::other, DType::other>(args, tensor, first, stop);
  });
}

// The rule with args.moments moments, at most kCount.
template <StateFormat kFormat, class Rule, int kCount>
LOWBIT_INLINE void step_with(const OptimStepArgs& args) {
  if constexpr (kCount > moments_of<Rule>(Hyper{}))
    if (args.moments < kCount) return step_with<kFormat, Rule, kCount - 1>(args);
  step_all<kFormat, typename Rule::template Step<kCount>>(args);
}

template <StateFormat kFormat>
std::string_view refuses(const OptimStepArgs& args) {
  return args.format == kFormat ? "" : "another state format";
}

template <StateFormat kFormat>
void run_step(const OptimStepArgs& args) {
  if (args.found_inf && *args.found_inf != 0) return;
  for (const OptimTensor& tensor : args.tensors) *tensor.step_count += 1;
  with_rule(args.rule, [&]<class Rule>() { step_with<kFormat, Rule, kMaxMomentsOf<Rule>>(args); });
}

#define LOWBIT_STEP_ROW(format) \
  {LOWBIT_ROW("optim_step_" #format), refuses<StateFormat::format>, run_step<StateFormat::format>}
constexpr Kernel<OptimStepArgs> kRows[] = {LOWBIT_STEP_ROW(float32), LOWBIT_STEP_ROW(bfloat16),
                                           LOWBIT_STEP_ROW(dynamic8), LOWBIT_STEP_ROW(dynamic4),
                                           LOWBIT_STEP_ROW(float8)};

}  // namespace

void optim_step_rows(Backend& backend) { add(backend, kRows); }

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
