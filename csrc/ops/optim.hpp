// SPDX-License-Identifier: Apache-2.0
// optim: one step of an optimizer over a list of tensors, in place: parameters, moments (in their StateFormat) and step counts.
//   g = grad / grad_scale (written back), negated if maximize; weight decay; rule(p, g, moments); every moment rounded to its format
// The update uses the moments before they are rounded. Arithmetic is float32; parameters are rounded to nearest, or stochastically.
#pragma once

#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/tensor_view.hpp"
#include "formats/state_format.hpp"
#include "ops/kernel.hpp"
#include "rules/hyper.hpp"

namespace lowbit {

inline constexpr int kMaxMoments = 3;

struct OptimTensor {
  void* param;
  void* grad;
  DType param_dtype, grad_dtype;
  void* moment[kMaxMoments];
  float* scale[kMaxMoments];  // one per block; null in float formats
  int64_t numel;
  double step;    // counted from 1
  uint64_t seed;  // of stochastic rounding: of the call, the step and the position in the list
};

// float32 values to codes and scales, or back: what a step does to a moment.
struct StateConversion {
  bool encode, is_signed;
  int64_t numel;
  float* values;
  uint8_t* codes;
  float* scale;
};

struct OptimArgs {
  Rule rule = Rule::adamw;
  StateFormat format = StateFormat::float32;
  int64_t block_size = 0;
  Hyper hyper;
  std::span<const OptimTensor> tensors;
  float grad_scale = 1;              // gradients are divided by it
  bool stochastic_rounding = false;  // of bfloat16 parameters
  const StateConversion* conversion = nullptr;  // instead of a step
};

// Lists as the caller has them: params, grads, steps and each moment's entries go together by position. moments[i] is exp_avg, exp_avg_sq, max_exp_avg_sq
// (adamw), momentum_buffer (sgd; none without momentum) or exp_avg (lion).
struct OptimLists {
  std::vector<TensorView> params, grads, steps;
  std::vector<std::vector<TensorView>> moments, scales;
};
LOWBIT_API void optim_step(int64_t rule, int64_t format, int64_t block_size, const OptimLists& lists, const Hyper& hyper,
                           const TensorView& grad_scale, const TensorView& found_inf, std::optional<int64_t> seed);

LOWBIT_API void encode_state(const TensorView& values, int64_t format, bool is_signed, int64_t block_size, const TensorView& codes, const TensorView& scale);
LOWBIT_API void decode_state(const TensorView& codes, const TensorView& scale, int64_t format, bool is_signed, int64_t block_size, const TensorView& values);

}  // namespace lowbit
