// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/backward.hpp"

namespace lz = lowbit::level_zero;
using lz::AttentionCall, lz::kAttentionThreads;
LOWBIT_KERNEL(captured_64, kAttentionThreads, AttentionCall) { lz::attention_backward<64, true, false, true>(args); }
LOWBIT_KERNEL(captured_128, kAttentionThreads, AttentionCall) { lz::attention_backward<128, true, false, true>(args); }
LOWBIT_KERNEL(captured_256, kAttentionThreads, AttentionCall) { lz::attention_backward<256, true, false, true>(args); }

// Called by the gradient of score_mod, which the driver links (score/spirv.hpp).
extern "C" __device__ void score_add(const lz::Global<uint64_t>* table, int32_t tensor, int64_t at, uint32_t value) {
  auto* const sums = lz::sums_of(lz::global<int32_t>(reinterpret_cast<void*>(table[0])));
  if (at != lz::kOutside && tensor < lz::Sums::kOfMask && sums->of[tensor].words)
    lz::add_to(sums, tensor, at, __uint_as_float(value));
}
