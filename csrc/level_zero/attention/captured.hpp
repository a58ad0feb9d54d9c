// SPDX-License-Identifier: Apache-2.0
// Host code for gradients that are accumulated score by score (sums.hpp): of captured tensors and of the mask.
#pragma once

#include <vector>

#include "level_zero/attention/mods.hpp"
#include "ops/attention.hpp"

namespace lowbit::level_zero {

class CapturedGradients {
 public:
  // Why there are too many, or "".
  static std::string_view refuses(const AttentionBackwardArgs& args);
  static int64_t bytes(const AttentionBackwardArgs& args);  // device memory for `words`
  CapturedGradients(const AttentionBackwardArgs& args, const CallMods& mods, void* words);

  bool any() const { return !gradients_.empty(); }
  // One pass over the scores to find the largest values, one to add them all; then writes the gradients. kernel: in the
  // module attention_captured.
  void run(const AttentionCall& call, const char* kernel, int64_t groups) const;

 private:
  struct Gradient {
    int tensor;
    TensorView to;
    int64_t count;  // elements in memory
  };
  void write(const Gradient& gradient, const Sums& found) const;

  const AttentionBackwardArgs& args_;
  const CallMods& mods_;
  Sums sums_{};
  std::vector<Gradient> gradients_;
};

}  // namespace lowbit::level_zero
