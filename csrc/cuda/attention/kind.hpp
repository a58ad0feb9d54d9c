// SPDX-License-Identifier: Apache-2.0
// Specialisations of the attention kernels, and their sources.
#pragma once

#include "cuda/attention/call.hpp"
#include "cuda/sources.hpp"
#include "ops/attention.hpp"

namespace lowbit {
struct ScoreCall;
enum class Stage : uint8_t;
}

namespace lowbit::cuda {

enum class AttentionKernel : int64_t {
  prepare, statistics, sink, captured_ends, forward, backward, captured, forward_wgmma, prompt_wgmma, backward_wgmma
};

struct AttentionKind {
  DType dtype;
  int e, ev;
  const ScoreCall *score = nullptr, *mask = nullptr;
  DType bias = DType::other;  // dtype of the call's mask
  bool dropout = false, scales = false;  // scales: multiplies by a scale <= 0, which cannot be folded into the exponent

  bool folds() const { return !score && (bias == DType::other || bias == DType::boolean) && !scales; }
  Gathers gathers() const;
  ForwardShape forward() const { return forward_shape(e, ev, gathers()); }
  WgmmaForwardShape forward_wgmma() const { return wgmma_forward_shape(e, ev, gathers(), false); }
  WgmmaForwardShape prompt_wgmma() const { return wgmma_forward_shape(e, ev, gathers(), true); }
  BackwardShape backward() const { return backward_shape(e, ev, gathers()); }
  WgmmaBackwardShape backward_wgmma(bool keys_stay) const {
    return wgmma_backward_shape(e, ev, gathers(), keys_stay);
  }
  SourceKey key(AttentionKernel kernel) const;
};

bool gathers(const ScoreCall* mod, Stage from);  // whether it gathers in this stage or a later one; null: no
AttentionKind kind_of(const AttentionForwardArgs& args);
LOWBIT_API Source attention_source(const AttentionKind& kind, AttentionKernel kernel);

}  // namespace lowbit::cuda
