// SPDX-License-Identifier: Apache-2.0
// Rows of the ops optim_step, encode_state and decode_state: calls as tables for the kernels of the
// headers beside this.
#include "cuda/backend.hpp"
#include "cuda/sources.hpp"
#include "gpu/optim/table.hpp"
#include "ops/optim.hpp"

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

void run_step(const OptimStepArgs& args) {
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

template <class Args>
void convert(const Args& args, const char* kernel) {
  const int64_t numel = args.values.numel();
  if (numel == 0) return;
  const SourceKey key{static_cast<int64_t>(SourceKind::convert), static_cast<int64_t>(args.format), args.is_signed,
                      args.block_size};
  const Program& kernels = program(args.place, key, [&] {
    return convert_source(args.format, args.is_signed, args.block_size);
  });
  const ConvertArgs given{const_cast<float*>(args.values.template as<const float>()),
                          const_cast<uint8_t*>(args.codes.template as<const uint8_t>()),
                          const_cast<float*>(args.scale.template as<const float>()), numel};
  const int64_t ctas = ceil_div(numel, int64_t{elements_each(args.block_size)} * kStepThreads);
  kernels.launch(args.place, kernel, ctas, kStepThreads, &given);
}

void encode(const EncodeStateArgs& args) { convert(args, "encode_state"); }
void decode(const DecodeStateArgs& args) { convert(args, "decode_state"); }

template <StateFormat kFormat, class Args>
std::string_view refuses(const Args& args) {
  return args.format == kFormat ? "" : "another state format";
}

#define LOWBIT_ROW(op, format, Args, run) {op "_" #format "_cuda", refuses<StateFormat::format, Args>, run}
#define LOWBIT_STEP(format) LOWBIT_ROW("optim_step", format, OptimStepArgs, run_step)
#define LOWBIT_ENCODE(format) LOWBIT_ROW("encode_state", format, EncodeStateArgs, encode)
#define LOWBIT_DECODE(format) LOWBIT_ROW("decode_state", format, DecodeStateArgs, decode)
constexpr Kernel<OptimStepArgs> kStepRows[] = {LOWBIT_STEP(float32), LOWBIT_STEP(bfloat16), LOWBIT_STEP(dynamic8),
                                               LOWBIT_STEP(dynamic4), LOWBIT_STEP(float8)};
constexpr Kernel<EncodeStateArgs> kEncodeRows[] = {LOWBIT_ENCODE(dynamic8), LOWBIT_ENCODE(dynamic4),
                                                   LOWBIT_ENCODE(float8)};
constexpr Kernel<DecodeStateArgs> kDecodeRows[] = {LOWBIT_DECODE(dynamic8), LOWBIT_DECODE(dynamic4),
                                                   LOWBIT_DECODE(float8)};

static_assert(std::size(kStepRows) == std::size(kStateFormatNames));

}  // namespace

void add_optim_rows(Backend& backend) {
  add_rows(backend, kStepRows, std::size(kStepRows));
  add_rows(backend, kEncodeRows, std::size(kEncodeRows));
  add_rows(backend, kDecodeRows, std::size(kDecodeRows));
}

}  // namespace lowbit::cuda
