// SPDX-License-Identifier: Apache-2.0
// The rows of the op optim, compiled once per instruction set: one row per state format, every rule in it.
#include LOWBIT_ISA_HEADER

#include "core/parallel.hpp"
#include "core/scratch.hpp"
#include "cpu/optim/step.hpp"
#include "rules/adamw.hpp"
#include "rules/lion.hpp"
#include "rules/sgd.hpp"

namespace lowbit::cpu::LOWBIT_ISA_NAME {
namespace {

// Elements of one task: large enough that handing it out costs nothing (2 us at 8 GB/s a core), small enough to balance.
constexpr int64_t kTaskElements = 1 << 14;
static_assert(kTaskElements >= kMaxStateBlock);

constexpr DType known_here(DType dtype) { return kSpecializes ? dtype : DType::other; }

LOWBIT_INLINE int64_t tasks_of(const OptimTensor& tensor) { return (tensor.numel + kTaskElements - 1) / kTaskElements; }

// One parallel region for all tensors, their tasks in one numbering: a task belongs to the last tensor whose first task is not after it.
template <StateFormat kFormat, class Rule>
void step_all(const OptimArgs& args) {
  const int64_t count = static_cast<int64_t>(args.tensors.size());
  auto* first_task = static_cast<int64_t*>(scratch(Scratch::tile, static_cast<std::size_t>(count + 1) * sizeof(int64_t)));
  first_task[0] = 0;
  for (int64_t i = 0; i < count; i++) first_task[i + 1] = first_task[i] + tasks_of(args.tensors[i]);
  const int64_t tasks = first_task[count];
  parallel_for(tasks, num_threads(), [&](int64_t task) {
    int64_t found = 0, end = count;
    while (end - found > 1) {
      const int64_t middle = (found + end) / 2;
      (first_task[middle] <= task ? found : end) = middle;
    }
    const OptimTensor& tensor = args.tensors[found];
    const int64_t first = (task - first_task[found]) * (kTaskElements / args.block_size), blocks = (tensor.numel + args.block_size - 1) / args.block_size;
    const int64_t last = first + kTaskElements / args.block_size, stop = last < blocks ? last : blocks;
    const DType dtype = tensor.param_dtype == tensor.grad_dtype ? tensor.param_dtype : DType::other;
    if (kSpecializes && dtype == DType::float32) step_blocks<kFormat, Rule, known_here(DType::float32), known_here(DType::float32)>(args, tensor, first, stop);
    else if (kSpecializes && dtype == DType::bfloat16) step_blocks<kFormat, Rule, known_here(DType::bfloat16), known_here(DType::bfloat16)>(args, tensor, first, stop);
    else step_blocks<kFormat, Rule, DType::other, DType::other>(args, tensor, first, stop);
  });
}

template <StateFormat kFormat, bool kSigned>
void convert_all(const OptimArgs& args) {
  const StateConversion& conversion = *args.conversion;
  parallel_for((conversion.numel + args.block_size - 1) / args.block_size, num_threads(), [&](int64_t block) {
    const int64_t begin = block * args.block_size, left = conversion.numel - begin, count = left < args.block_size ? left : args.block_size;
    alignas(64) float values[kMaxStateBlock];
    uint8_t* codes = conversion.codes + state_bytes(kFormat, begin);
    if (!conversion.encode) {
      const typename StateCodes<kFormat, kSigned>::Decoder decoder(conversion.scale[block]);
      for (int64_t i = 0; i < count; i += kGroup) {
        f32x16 value[2], factor[2];
        decode_group<kFormat>(decoder, codes + state_bytes(kFormat, i), count - i, value, factor);
        for (int half = 0; half < 2; half++)
          store_from_float(conversion.values, DType::float32, begin + i + 16 * half, count - i - 16 * half, mul(value[half], factor[half]));
      }
      return;
    }
    i32x16 absmax = set1(0);
    for (int64_t i = 0; i < (count + kGroup - 1) / kGroup * kGroup; i += 16) {
      f32x16 value = load_as_float(conversion.values, DType::float32, begin + i, count - i);
      if (!kSigned) value = max(set1(0.0f), value);  // nan stays
      store(values + i, value);
      absmax = max(absmax, bits_of(abs(value)));
    }
    encode_block<kFormat, kSigned>(absmax, 1.0f, count, values, codes, conversion.scale + block);
  });
}

template <StateFormat kFormat>
std::string_view refuses(const OptimArgs& args) {
  return args.format == kFormat ? "" : "another state format";
}

template <StateFormat kFormat>
void run_optim(const OptimArgs& args) {
  if constexpr (has_codes(kFormat))
    if (args.conversion) return args.conversion->is_signed ? convert_all<kFormat, true>(args) : convert_all<kFormat, false>(args);
  switch (args.rule) {
    case Rule::adamw: return args.hyper.amsgrad ? step_all<kFormat, AdamW<true>>(args) : step_all<kFormat, AdamW<false>>(args);
    case Rule::sgd: return args.hyper.momentum != 0 ? step_all<kFormat, Sgd<true>>(args) : step_all<kFormat, Sgd<false>>(args);
    case Rule::lion: return step_all<kFormat, Lion>(args);
  }
}

#define LOWBIT_STRING_OF(name) #name
#define LOWBIT_STRING(name) LOWBIT_STRING_OF(name)
#define LOWBIT_ROW(format) {"optim_" #format "_" LOWBIT_STRING(LOWBIT_ISA_NAME), refuses<StateFormat::format>, run_optim<StateFormat::format>}

#ifndef LOWBIT_HAS_VNNI  // VNNI adds integer products only: the rows would be those of avx512
constexpr Kernel<OptimArgs> kRows[] = {LOWBIT_ROW(float32), LOWBIT_ROW(bfloat16), LOWBIT_ROW(dynamic8), LOWBIT_ROW(dynamic4), LOWBIT_ROW(float8)};
#endif

}  // namespace

#ifndef LOWBIT_HAS_VNNI
std::span<const Kernel<OptimArgs>> optim_rows() { return kRows; }
#else
std::span<const Kernel<OptimArgs>> optim_rows() { return {}; }
#endif

}  // namespace lowbit::cpu::LOWBIT_ISA_NAME
