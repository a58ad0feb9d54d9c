// SPDX-License-Identifier: Apache-2.0
#define LOWBIT_LANES 16
#include "level_zero/attention/backward.hpp"

namespace lz = lowbit::level_zero;
using lz::AttentionCall, lz::kAttentionThreads;
LOWBIT_KERNEL(captured_64, kAttentionThreads, AttentionCall) { lz::attention_backward<64, true, false, true>(args); }
LOWBIT_KERNEL(captured_128, kAttentionThreads, AttentionCall) { lz::attention_backward<128, true, false, true>(args); }
LOWBIT_KERNEL(captured_256, kAttentionThreads, AttentionCall) { lz::attention_backward<256, true, false, true>(args); }

// Called by the gradient of score_mod, which the driver links (score/spirv.hpp).
extern "C" __device__ void add_to_sum(lz::Global<float>* to, float value, lz::Global<int32_t>* fault) {
  const auto address = reinterpret_cast<uint64_t>(to), begin = uint64_t{1} << lz::kSumShift;
  lz::add_to(lz::sums_of(fault), static_cast<int>(address / begin) - 1, static_cast<int64_t>(address % begin) / 4,
             value);
}
